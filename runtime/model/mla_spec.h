// The widths of multi-head latent attention.
#pragma once

#include <cstdint>

namespace heddle {

// DeepSeek-V2, section 2.1 (arXiv:2405.04434): keys and values of all heads are expanded from one
// latent of a token, beside which the cache keeps a key of qk_rope_head_dim that all heads share.
// A query's head is [qk_nope_head_dim | qk_rope_head_dim]; only the second part is rotated.
struct MlaSpec {
  // Of the norms of both latents, whatever rms_norm_eps is (DeepSeek's modeling_deepseek.py).
  static constexpr double kLatentNormEpsilon = 1e-6;

  int64_t q_lora_rank = 0;  // width of the queries' latent; 0: one projection without a latent
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
};

}  // namespace heddle
