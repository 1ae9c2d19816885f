#include "kernels/moe/expert_combine.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateExpertCombine(const ExpertCombineArgs& args) {
  RETURN_IF_ERROR(ValidateFloatMatrix("expert_combine", "y", args.y));
  RETURN_IF_ERROR(ValidateFloatMatrix("expert_combine", "out", args.out));
  RETURN_IF_ERROR(ValidateShape("expert_combine", "y", args.y, args.y.rows, args.out.cols));
  if (args.top_k < 0) {
    return absl::InvalidArgumentError(absl::StrCat("expert_combine: top ", args.top_k));
  }
  const int64_t choices = args.out.rows * args.top_k;
  RETURN_IF_ERROR(ValidateArray("expert_combine", "entry_of", args.entry_of, choices));
  return ValidateArray("expert_combine", "weights", args.weights, choices);
}

}  // namespace heddle
