// JSON from files nobody vouches for.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace heddle {

// Parses `text`; InvalidArgument names `file_name` and the place if the text is not JSON, gives a
// key twice in one object, or nests deeper than any configuration does (64).
absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text, absl::string_view file_name);

}  // namespace heddle
