// y = x W^T + b.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// What activations are multiplied as. kInt8 quantises each row of x to int8 per 32 elements and is
// legal for block-quantised weights only.
enum class ActivationPrecision { kFloat32, kInt8 };

// Each output element sums over k in one order whatever the number of rows, so a row's bits do not
// depend on its batch mates. n == 0, k == 0 (gives the bias or zeros) and rows == 0 are legal.
struct LinearArgs {
  ConstMatrixView x;            // [tokens, k]
  PackedWeight weight;          // [n, k]
  const float* bias = nullptr;  // [n], or null
  MatrixView out;               // [tokens, n]
  ActivationPrecision precision = ActivationPrecision::kFloat32;
};

absl::Status ValidateLinear(const LinearArgs& args);
using LinearFn = absl::Status (*)(const LinearArgs& args, Stream& stream);

}  // namespace heddle
