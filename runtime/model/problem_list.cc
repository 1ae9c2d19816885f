#include "runtime/model/problem_list.h"

#include "absl/strings/str_cat.h"

namespace heddle {

absl::Status ProblemsToStatus(absl::string_view subject, const std::vector<std::string>& problems) {
  constexpr size_t kMaxLines = 100;
  if (problems.empty()) return absl::OkStatus();
  std::string text = absl::StrCat(subject, " has ", problems.size(),
                                  problems.size() == 1 ? " problem:" : " problems:");
  for (size_t i = 0; i < problems.size() && i < kMaxLines; ++i) {
    absl::StrAppend(&text, "\n  ", problems[i]);
  }
  if (problems.size() > kMaxLines) {
    absl::StrAppend(&text, "\n  and ", problems.size() - kMaxLines, " more");
  }
  return absl::InvalidArgumentError(text);
}

}  // namespace heddle
