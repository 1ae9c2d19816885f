// y = x W_e^T where each row has its expert e: the products of a mixture of experts.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// Entries are rows of `out`, grouped by expert: those of expert e are [expert_starts[e],
// expert_starts[e + 1]). Entry i multiplies row entry_tokens[i] of x, or row i where there are no
// entry_tokens. How many entries an expert has is known to the device alone: `out` has room for the
// most there can be, and rows from expert_starts[experts] on are left alone.
//
// Weights of experts without entries are not read. The bits of a row are those that `linear` gives
// for it with its expert's weight. n == 0 and k == 0 (gives zeros) are legal.
struct GroupedLinearArgs {
  ConstMatrixView x;                       // [tokens, k]; [entries, k] without entry_tokens
  const int32_t* entry_tokens = nullptr;   // [entries], device, each < x.rows; or null
  const int32_t* expert_starts = nullptr;  // [experts + 1], device, ascending from 0
  PackedWeightStack weights;               // [experts] of [n, k]
  MatrixView out;                          // [entries, n]
  ActivationPrecision precision = ActivationPrecision::kFloat32;
};

absl::Status ValidateGroupedLinear(const GroupedLinearArgs& args);
using GroupedLinearFn = absl::Status (*)(const GroupedLinearArgs& args, Stream& stream);

}  // namespace heddle
