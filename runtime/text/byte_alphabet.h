// The letters in which byte-level vocabularies spell bytes: printable ASCII and
// Latin-1 stand for themselves, the other 68 bytes for U+0100 to U+0143.
#pragma once

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace heddle {

// The bytes that `text` spells, or nothing if one of its letters is not of the alphabet.
std::optional<std::string> BytesOfLetters(absl::string_view text);

}  // namespace heddle
