#include "kernels/gemm/head_linear.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateHeadLinear(const HeadLinearArgs& args) {
  constexpr char kOp[] = "head_linear";
  const PackedWeightStack& weights = args.weights;
  if (weights.count < 0 || weights.stride_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOp, ": ", weights.count, " weights ", weights.stride_bytes, " bytes apart"));
  }
  RETURN_IF_ERROR(ValidateHeads(kOp, "x", args.x));
  RETURN_IF_ERROR(ValidateHeads(kOp, "out", args.out));
  RETURN_IF_ERROR(
      ValidateHeadsShape(kOp, "x", args.x, args.out.tokens, weights.count, weights.first.k));
  RETURN_IF_ERROR(
      ValidateHeadsShape(kOp, "out", args.out, args.x.tokens, weights.count, weights.first.n));
  return ValidateArray(kOp, "weights", weights.first.data,
                       weights.count * weights.first.n * weights.first.k);
}

}  // namespace heddle
