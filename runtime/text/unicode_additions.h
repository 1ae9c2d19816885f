// Characters younger than the Unicode 14 of PCRE2 10.42.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace heddle {

// The characters that Unicode 15 to 16 added to a general category ("Lu" or "L") or
// to the script Han, as ranges to go into a class of PCRE2's. The new emoji matter most.
std::string UnicodeAdditions(absl::string_view property);

}  // namespace heddle
