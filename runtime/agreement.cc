#include "runtime/agreement.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {

absl::Status AgreeOnStatus(const absl::Status& status, ControlChannel& control) {
  const auto encode = [](const absl::Status& s) {
    return std::string(1, static_cast<char>(s.code())) + std::string(s.message());
  };
  ASSIGN_OR_RETURN(const std::vector<std::string> statuses, control.Gather(encode(status)));
  std::string agreed = encode(absl::OkStatus());
  for (const std::string& one : statuses) {
    if (one[0] == static_cast<char>(absl::StatusCode::kOk)) continue;
    agreed = one;
    break;
  }
  RETURN_IF_ERROR(control.Broadcast(agreed));
  return absl::Status(static_cast<absl::StatusCode>(agreed[0]), agreed.substr(1));
}

}  // namespace heddle
