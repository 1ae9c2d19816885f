// The attention block of a Llama-like layer on one rank's heads.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/page_pool.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "runtime/model/activation.h"
#include "runtime/model/model_spec.h"
#include "runtime/model/rotary_table.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/weights.h"
#include "runtime/shard_layout.h"

namespace heddle {

// Projections, rotary embedding, cache and attention. Owned by the decoder, used for each of its
// layers in turn; its activations are overwritten by the next one.
class GqaAttentionBlock {
 public:
  // `pool` is null without a cache. The references outlive the block.
  static absl::StatusOr<GqaAttentionBlock> Create(const ModelSpec& spec, const RankLayout& layout,
                                                  const StepLimits& limits, int64_t max_model_len,
                                                  const PagePool* pool,
                                                  ActivationPrecision precision, Backend& backend);

  // x [tokens, hidden] is normed. `out` [tokens, hidden] receives this rank's summand: zeros, or a
  // bias, from a rank without heads.
  absl::Status Forward(int64_t layer, const GqaWeights& weights, ConstMatrixView x,
                       const StepInputs& inputs, const StepShape& shape, MatrixView out,
                       const Tap& tap, Stream& stream);

 private:
  GqaAttentionBlock(const ModelSpec& spec, const RankLayout& layout, RotaryTable rotary,
                    const PagePool* pool, ActivationPrecision precision, Backend& backend);

  absl::Status Attend(int64_t layer, const StepInputs& inputs, const StepShape& shape,
                      Stream& stream);
  absl::Status NormHeads(const float* weight, MatrixView x, int64_t num_heads, Stream& stream);

  const ModelSpec& spec_;
  const KernelTable& kernels_;
  const PagePool* pool_;
  const ActivationPrecision precision_;
  const int64_t query_heads_;
  const int64_t kv_heads_;
  RotaryTable rotary_;
  Activation q_;         // [tokens, query_heads * head_dim]
  Activation k_;         // [tokens, kv_heads * head_dim]
  Activation v_;         // [tokens, kv_heads * head_dim]
  Activation attended_;  // [tokens, query_heads * head_dim]
};

}  // namespace heddle
