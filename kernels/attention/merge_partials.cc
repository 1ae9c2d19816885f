#include "kernels/attention/merge_partials.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateMergePartials(const MergePartialsArgs& args) {
  constexpr char kOp[] = "merge_partials";
  if (args.num_parts < 0) {
    return absl::InvalidArgumentError(absl::StrCat(kOp, ": ", args.num_parts, " parts"));
  }
  const auto [data, tokens, heads, dim, token_stride, head_stride] = args.out;
  RETURN_IF_ERROR(ValidateHeads(kOp, "out", args.out));
  if (args.log_sum_exp.data != nullptr) {
    RETURN_IF_ERROR(ValidateHeads(kOp, "log_sum_exp", args.log_sum_exp));
    RETURN_IF_ERROR(ValidateHeadsShape(kOp, "log_sum_exp", args.log_sum_exp, tokens, heads, 1));
  }
  if (args.num_parts == 0) return absl::OkStatus();
  RETURN_IF_ERROR(ValidateHeads(kOp, "partials", args.partials));
  RETURN_IF_ERROR(ValidateHeads(kOp, "log_sum_exps", args.log_sum_exps));
  RETURN_IF_ERROR(ValidateHeadsShape(kOp, "partials", args.partials, tokens, heads, dim));
  return ValidateHeadsShape(kOp, "log_sum_exps", args.log_sum_exps, tokens, heads, 1);
}

}  // namespace heddle
