#include "runtime/model/dense_ffn.h"

#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {

absl::StatusOr<DenseFfnBlock> DenseFfnBlock::Create(int64_t max_columns, const StepLimits& limits,
                                                    ActivationPrecision precision,
                                                    Backend& backend) {
  const size_t bytes = static_cast<size_t>(limits.max_tokens * max_columns) * sizeof(float);
  DenseFfnBlock block(precision, backend);
  ASSIGN_OR_RETURN(block.gate_, backend.Allocate(bytes));
  ASSIGN_OR_RETURN(block.up_, backend.Allocate(bytes));
  return block;
}

absl::Status DenseFfnBlock::Forward(const DenseFfnWeights& weights, ConstMatrixView x,
                                    MatrixView out, Stream& stream) {
  const int64_t columns = weights.down.weight.k;
  const MatrixView gate = FloatMatrix(gate_.as<float>(), x.rows, columns);
  const MatrixView up = FloatMatrix(up_.as<float>(), x.rows, columns);
  if (columns > 0) {
    RETURN_IF_ERROR(Project(x, weights.gate, gate, precision_, kernels_, stream));
    RETURN_IF_ERROR(Project(x, weights.up, up, precision_, kernels_, stream));
    RETURN_IF_ERROR(kernels_.silu_mul({.gate = gate, .up = up, .out = gate}, stream));
  }
  return Project(gate, weights.down, out, precision_, kernels_, stream);
}

}  // namespace heddle
