// out[t, h] = x[t, h] W_h^T: a weight of its own for each head.
//
// MLA's absorption (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): queries into latent space by
// W_UK, attention's outputs out of it by W_UV.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/stream.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// Each output element sums over k in one order whatever the number of tokens, so a row's bits do
// not depend on its batch mates. Sizes of 0 are legal; k == 0 gives zeros.
struct HeadLinearArgs {
  ConstHeadsView x;           // [tokens, heads, k]
  PackedWeightStack weights;  // [heads] of [n, k]
  HeadsView out;              // [tokens, heads, n]
};

absl::Status ValidateHeadLinear(const HeadLinearArgs& args);
using HeadLinearFn = absl::Status (*)(const HeadLinearArgs& args, Stream& stream);

}  // namespace heddle
