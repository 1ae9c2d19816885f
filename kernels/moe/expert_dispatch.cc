#include "kernels/moe/expert_dispatch.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateExpertDispatch(const ExpertDispatchArgs& args) {
  int64_t choices = 0;
  if (args.num_tokens < 0 || args.top_k < 0 ||
      __builtin_mul_overflow(args.num_tokens, args.top_k, &choices) ||
      choices > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert_dispatch: top ", args.top_k, " of ", args.num_tokens, " tokens"));
  }
  if (args.first_expert < 0 || args.num_experts < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert_dispatch: ", args.num_experts, " experts from ", args.first_expert));
  }
  RETURN_IF_ERROR(ValidateArray("expert_dispatch", "expert_starts", args.expert_starts, 1));
  RETURN_IF_ERROR(ValidateArray("expert_dispatch", "expert_ids", args.expert_ids, choices));
  RETURN_IF_ERROR(ValidateArray("expert_dispatch", "entry_tokens", args.entry_tokens, choices));
  return ValidateArray("expert_dispatch", "entry_of", args.entry_of, choices);
}

}  // namespace heddle
