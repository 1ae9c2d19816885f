// MLA's absorbed attention over the paged latent cache: all heads share one key and value, the
// latent (DeepSeek-V2, arXiv:2405.04434, section 2.1).
#pragma once

#include "absl/status/status.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/stream.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// Sequences have ragged query lengths >= 1; the step's own latents have been appended before. A
// query at position p sees the stored positions q <= p, with score
// scale * (q_latent . latent + q_rope . rope), and sums latents.
//
// The context is cut in chunks at fixed global positions (multiples of kMlaChunk), each worked off
// in blocks (multiples of kMlaBlock) from nothing; chunks are folded in ascending order. So neither
// threads nor batch mates nor the query length change a row's bits, and where the cache is striped
// a rank folds what it holds of each chunk. Masked slots never enter arithmetic. A query that sees
// nothing gives zeros and log-sum-exp of -infinity.
inline constexpr int64_t kMlaBlock = 64;
inline constexpr int64_t kMlaChunk = 256;

struct MlaDecodeArgs {
  ConstHeadsView q_latent;  // [tokens, heads, kv_lora_rank]: the query's nope part times W_UK
  ConstHeadsView q_rope;    // [tokens, heads, rope_dim], rotated
  PagedLatentView kv;
  int64_t num_sequences = 0;
  const int32_t* query_starts = nullptr;  // [num_sequences + 1], device, into the tokens
  const int32_t* positions = nullptr;     // [tokens], device
  float scale = 1.0f;
  HeadsView out;                 // [tokens, heads, kv_lora_rank]
  float* log_sum_exp = nullptr;  // [heads, tokens], or null
};

absl::Status ValidateMlaDecode(const MlaDecodeArgs& args);
using MlaDecodeFn = absl::Status (*)(const MlaDecodeArgs& args, Stream& stream);

}  // namespace heddle
