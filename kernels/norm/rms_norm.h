// y = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, arXiv:1910.07467).
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

// With x viewed as [tokens * heads, head_dim] this is also the per-head norm of Qwen3. `out` may be
// `x`. The sum is in float32 in one fixed order.
struct RmsNormArgs {
  ConstMatrixView x;              // [rows, width]
  const float* weight = nullptr;  // [width]
  float epsilon = 1e-5f;
  MatrixView out;  // [rows, width]
};

absl::Status ValidateRmsNorm(const RmsNormArgs& args);
using RmsNormFn = absl::Status (*)(const RmsNormArgs& args, Stream& stream);

}  // namespace heddle
