// Several faults of one file as one error.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace heddle {

// OK if there are none; else InvalidArgument: "SUBJECT has 2 problems:" and a line for each (of
// very many, the first hundred).
absl::Status ProblemsToStatus(absl::string_view subject, const std::vector<std::string>& problems);

}  // namespace heddle
