#include "kernels/gemm/grouped_linear.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateGroupedLinear(const GroupedLinearArgs& args) {
  const PackedWeight& weight = args.weights.first;
  RETURN_IF_ERROR(ValidateFloatMatrix("grouped_linear", "x", args.x));
  RETURN_IF_ERROR(ValidateFloatMatrix("grouped_linear", "out", args.out));
  const int64_t x_rows = args.entry_tokens == nullptr ? args.out.rows : args.x.rows;
  RETURN_IF_ERROR(ValidateShape("grouped_linear", "x", args.x, x_rows, weight.k));
  RETURN_IF_ERROR(ValidateShape("grouped_linear", "out", args.out, args.out.rows, weight.n));
  if (args.precision == ActivationPrecision::kInt8 && !IsBlockQuantised(weight.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("grouped_linear: int8 activations need block-quantised weights, not ",
                     DTypeName(weight.dtype)));
  }
  if (args.weights.count < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("grouped_linear: ", args.weights.count, " experts"));
  }
  RETURN_IF_ERROR(ValidateArray("grouped_linear", "expert_starts", args.expert_starts, 1));
  return ValidateArray("grouped_linear", "weights", weight.data,
                       args.weights.count * weight.n * weight.k);
}

}  // namespace heddle
