#include "runtime/model/activation.h"

#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {

absl::StatusOr<Activation> Activation::Create(int64_t max_rows, int64_t cols, Backend& backend) {
  Activation activation;
  activation.cols_ = cols;
  ASSIGN_OR_RETURN(activation.buffer_,
                   backend.Allocate(static_cast<size_t>(max_rows * cols) * sizeof(float)));
  return activation;
}

absl::Status Project(ConstMatrixView x, const Projection& projection, MatrixView out,
                     ActivationPrecision precision, const KernelTable& kernels, Stream& stream) {
  const PackedWeight& weight = projection.weight;
  return kernels.linear(
      {.x = x,
       .weight = weight,
       .bias = projection.bias,
       .out = out,
       .precision = IsBlockQuantised(weight.dtype) ? precision : ActivationPrecision::kFloat32},
      stream);
}

}  // namespace heddle
