#include "kernels/gemm/linear.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateLinear(const LinearArgs& args) {
  const PackedWeight& weight = args.weight;
  RETURN_IF_ERROR(ValidateFloatMatrix("linear", "x", args.x));
  RETURN_IF_ERROR(ValidateFloatMatrix("linear", "out", args.out));
  RETURN_IF_ERROR(ValidateShape("linear", "x", args.x, args.out.rows, weight.k));
  RETURN_IF_ERROR(ValidateShape("linear", "out", args.out, args.x.rows, weight.n));
  if (args.precision == ActivationPrecision::kInt8 && !IsBlockQuantised(weight.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "linear: int8 activations need block-quantised weights, not ", DTypeName(weight.dtype)));
  }
  RETURN_IF_ERROR(ValidateArray("linear", "weight", weight.data, weight.n * weight.k));
  return absl::OkStatus();
}

}  // namespace heddle
