// The attention block of a DeepSeek-like layer on one rank's heads: multi-head latent attention.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/page_pool.h"
#include "kernels/base/backend.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "parallel/communicator.h"
#include "runtime/model/activation.h"
#include "runtime/model/mla_spec.h"
#include "runtime/model/model_spec.h"
#include "runtime/model/rotary_table.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/stripe_exchange.h"
#include "runtime/model/weights.h"
#include "runtime/shard_layout.h"

namespace heddle {

// Tokens of a ContextPiece whose expanded keys and values take little memory on a rank of
// `num_heads` heads.
int64_t MlaPieceTokens(const MlaSpec& spec, int64_t num_heads);

// Projections, latent cache and attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Owned by
// the decoder, used for each of its layers in turn; its activations are overwritten by the next
// one.
class MlaAttentionBlock {
 public:
  // Collective if there are stripes. `pool` is null without a cache. The references outlive the
  // block.
  static absl::StatusOr<MlaAttentionBlock> Create(const ModelSpec& spec, const ShardLayout& layout,
                                                  int rank, const StepLimits& limits,
                                                  int64_t max_model_len, const PagePool* pool,
                                                  ActivationPrecision precision, Backend& backend,
                                                  Communicator& communicator);

  // x [own tokens, hidden] is normed. `out` [own tokens, hidden] receives this rank's summand:
  // zeros, or a bias, from a rank without heads; all where attention is data-parallel.
  absl::Status Forward(int64_t layer, const MlaWeights& weights, ConstMatrixView x,
                       const StepInputs& inputs, const StepShape& shape, MatrixView out,
                       const Tap& tap, Stream& stream);

 private:
  MlaAttentionBlock(const ModelSpec& spec, const RankLayout& layout, RotaryTable rotary,
                    const PagePool* pool, ActivationPrecision precision, Backend& backend);

  // Sets q_ and, normed and rotated, kv_a_.
  absl::Status ProjectInputs(const MlaWeights& weights, ConstMatrixView x, const StepInputs& inputs,
                             Stream& stream);
  absl::Status Append(int64_t layer, const StepInputs& inputs, int64_t tokens, Stream& stream);
  // The step's first tokens, in latent space.
  absl::Status AttendAbsorbed(int64_t layer, const MlaWeights& weights, const StepInputs& inputs,
                              const StepShape& shape, Stream& stream);
  // Absorbed attention of `queries` [tokens, heads, kv_lora_rank + qk_rope_head_dim] over this
  // rank's pages; log_sum_exp [heads, tokens] may be null.
  absl::Status AttendToLatents(int64_t layer, ConstHeadsView queries, const StepInputs& inputs,
                               const StepShape& shape, HeadsView out, float* log_sum_exp,
                               Stream& stream);
  // The same over the pages of all stripes. `queries` are this rank's of a round of up to
  // `max_heads` heads from its `first_head` on.
  absl::Status AttendWithGroup(int64_t layer, ConstHeadsView queries, int64_t first_head,
                               int64_t max_heads, const StepInputs& inputs, const StepShape& shape,
                               HeadsView out, Stream& stream);
  // The pages of a piece that earlier steps stored, on whatever stripe.
  absl::StatusOr<PagedLatentView> PiecePages(int64_t layer, const ContextPiece& piece,
                                             const StepInputs& inputs, Stream& stream);
  // The others, with keys and values expanded piece by piece.
  absl::Status AttendExpanded(int64_t layer, const MlaWeights& weights, const StepInputs& inputs,
                              const StepShape& shape, Stream& stream);
  absl::Status Norm(MatrixView x, const float* weight, Stream& stream);
  PagedLatentView Pages(int64_t layer, const StepInputs& inputs) const;

  // The parts of kv_a_: normed latents, and the rotated key that all heads share.
  MatrixView Latents(int64_t tokens) const;
  MatrixView RotatedKeys(int64_t tokens) const;

  const ModelSpec& spec_;
  const MlaSpec& mla_;
  const KernelTable& kernels_;
  const PagePool* pool_;
  const ActivationPrecision precision_;
  const int64_t num_heads_;
  // In a stripe group a rank without heads still holds latents for the others.
  const bool holds_latents_;
  const float scale_;
  RotaryTable rotary_;
  int64_t max_absorbed_rows_ = 0;  // (token, head) pairs that are in latent space at once
  Activation q_a_;                 // [tokens, q_lora_rank]
  Activation q_;                   // [tokens, heads * head_dim]
  Activation kv_a_;                // [tokens, kv_lora_rank + qk_rope_head_dim]
  Activation absorbed_q_;          // [absorbed rows, kv_lora_rank + qk_rope_head_dim]
  Activation latent_out_;          // [absorbed rows, kv_lora_rank]
  Activation piece_latent_;        // [piece tokens, kv_lora_rank]
  Activation piece_rope_;          // [piece tokens, qk_rope_head_dim]
  Activation piece_expanded_;      // [piece tokens, heads * (qk_nope_head_dim + v_head_dim)]
  Activation maximum_;             // [tokens, heads]
  Activation sum_;                 // [tokens, heads]
  Activation attended_;            // [tokens, heads * v_head_dim]
  // Only with stripes.
  std::unique_ptr<StripeExchange> stripes_;
  Activation group_log_sum_exp_;  // [absorbed rows of the group, 1]
  DeviceBuffer piece_pages_[2];   // latent and rope pages of a piece
};

}  // namespace heddle
