// out = silu(gate) * up, the gated activation of Llama-like feed-forward blocks.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

struct SiluMulArgs {
  ConstMatrixView gate;  // [tokens, width]
  ConstMatrixView up;    // [tokens, width]
  MatrixView out;        // [tokens, width]; may be gate or up
  // Device: how many rows count, where the host does not know; the others are left alone.
  const int32_t* num_rows = nullptr;
};

absl::Status ValidateSiluMul(const SiluMulArgs& args);
using SiluMulFn = absl::Status (*)(const SiluMulArgs& args, Stream& stream);

}  // namespace heddle
