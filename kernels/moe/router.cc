#include "kernels/moe/router.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateRouter(const RouterArgs& args) {
  RETURN_IF_ERROR(ValidateFloatMatrix("router", "logits", args.logits));
  const int64_t experts = args.logits.cols;
  if (args.num_groups < 1 || args.num_top_groups < 1 || args.num_top_groups > args.num_groups ||
      experts % args.num_groups != 0) {
    return absl::InvalidArgumentError(absl::StrCat("router: ", args.num_top_groups, " of ",
                                                   args.num_groups, " groups of ", experts,
                                                   " experts"));
  }
  const int64_t group_size = experts / args.num_groups;
  if (args.group_score == GroupScore::kTopTwoSum && args.num_groups > 1 && group_size < 2) {
    return absl::InvalidArgumentError("router: the two best experts of groups of one");
  }
  if (args.top_k < 1 || args.top_k > args.num_top_groups * group_size) {
    return absl::InvalidArgumentError(absl::StrCat("router: top ", args.top_k, " of ",
                                                   args.num_top_groups, " groups of ", group_size,
                                                   " experts"));
  }
  if (!std::isfinite(args.scaling_factor)) {
    return absl::InvalidArgumentError(absl::StrCat("router: scaling factor ", args.scaling_factor));
  }
  RETURN_IF_ERROR(ValidateArray("router", "expert_ids", args.expert_ids, args.logits.rows));
  return ValidateArray("router", "expert_weights", args.expert_weights, args.logits.rows);
}

}  // namespace heddle
