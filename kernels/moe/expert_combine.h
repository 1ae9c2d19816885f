// Each token's weighted sum of what its experts gave.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

// out[t] = (add ? out[t] : 0) + sum over ascending j of weights[t, j] * y[entry_of[t, j]], where
// choices without an entry (-1) are left out.
struct ExpertCombineArgs {
  ConstMatrixView y;                  // [entries, width]
  const int32_t* entry_of = nullptr;  // [tokens, top_k], device, each < y.rows
  const float* weights = nullptr;     // [tokens, top_k], device
  int64_t top_k = 0;
  bool add = false;
  MatrixView out;  // [tokens, width]
};

absl::Status ValidateExpertCombine(const ExpertCombineArgs& args);
using ExpertCombineFn = absl::Status (*)(const ExpertCombineArgs& args, Stream& stream);

}  // namespace heddle
