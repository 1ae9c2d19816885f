// Attention over parts of a context put together, as the ranks of a stripe group compute it.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/stream.h"

namespace heddle {

// Each part is a softmax over its own keys with its log-sum-exp. out = sum_i exp(lse_i - lse) *
// part_i with lse = log(sum_i exp(lse_i)), in ascending order of parts. A part whose lse is
// -infinity has seen nothing and is not read; where all have, zeros and -infinity.
struct MergePartialsArgs {
  ConstHeadsView partials;      // part 0: [tokens, heads, dim]
  int64_t partial_stride = 0;   // elements from a part to the next
  ConstHeadsView log_sum_exps;  // part 0: [tokens, heads, 1]
  int64_t log_sum_exp_stride = 0;
  int64_t num_parts = 0;
  HeadsView out;          // [tokens, heads, dim]; does not overlap the parts
  HeadsView log_sum_exp;  // [tokens, heads, 1], or without data
};

absl::Status ValidateMergePartials(const MergePartialsArgs& args);
using MergePartialsFn = absl::Status (*)(const MergePartialsArgs& args, Stream& stream);

}  // namespace heddle
