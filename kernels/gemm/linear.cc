#include "kernels/gemm/linear.h"

#include "absl/strings/str_cat.h"

namespace heddle {

absl::Status ValidateLinear(const LinearArgs& args) {
  const auto& [x, weight, bias, out, precision] = args;
  if (x.cols != weight.k || out.cols != weight.n || x.rows != out.rows || x.rows < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear: x [", x.rows, ", ", x.cols, "] times a weight of [", weight.n, ", ",
                     weight.k, "] does not give [", out.rows, ", ", out.cols, "]"));
  }
  if (x.rows > 1 && (x.row_stride < x.cols || out.row_stride < out.cols)) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear: rows overlap: strides ", x.row_stride, " of x and ", out.row_stride,
                     " of out are below ", x.cols, " and ", out.cols, " columns"));
  }
  if (precision == ActivationPrecision::kInt8 && !IsBlockQuantised(weight.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("linear: int8 activations need block-quantised ",
                                                   "weights, not ", DTypeName(weight.dtype)));
  }
  if (x.rows == 0 || weight.n == 0) return absl::OkStatus();
  if (out.data == nullptr || (weight.k > 0 && (x.data == nullptr || weight.data == nullptr))) {
    return absl::InvalidArgumentError("linear: x, weight or out is null");
  }
  return absl::OkStatus();
}

}  // namespace heddle
