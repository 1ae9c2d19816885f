// The attention block of a Llama-like layer on one rank's heads.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/page_pool.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "parallel/communicator.h"
#include "runtime/model/activation.h"
#include "runtime/model/model_spec.h"
#include "runtime/model/rotary_table.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/stripe_exchange.h"
#include "runtime/model/weights.h"
#include "runtime/shard_layout.h"

namespace heddle {

// Projections, rotary embedding, cache and attention. Owned by the decoder, used for each of its
// layers in turn; its activations are overwritten by the next one.
class GqaAttentionBlock {
 public:
  // Collective if there are stripes. `pool` is null without a cache. The references outlive the
  // block.
  static absl::StatusOr<GqaAttentionBlock> Create(const ModelSpec& spec, const ShardLayout& layout,
                                                  int rank, const StepLimits& limits,
                                                  int64_t max_model_len, const PagePool* pool,
                                                  ActivationPrecision precision, Backend& backend,
                                                  Communicator& communicator);

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
  // Attends with `num_heads` query heads over this rank's pages. log_sum_exp may be null.
  absl::Status AttendToPages(int64_t layer, ConstMatrixView q, int64_t num_heads,
                             const StepInputs& inputs, const StepShape& shape, MatrixView out,
                             float* log_sum_exp, Stream& stream);
  // The same with the queries of the whole stripe group, merged for this rank's heads.
  absl::Status AttendWithGroup(int64_t layer, const StepInputs& inputs, const StepShape& shape,
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
  // Only with stripes.
  std::unique_ptr<StripeExchange> stripes_;
  int64_t group_heads_ = 0;
  Activation group_q_;            // [tokens, group_heads * head_dim]
  Activation group_out_;          // [tokens, group_heads * head_dim]
  Activation group_log_sum_exp_;  // [tokens, group_heads]
};

}  // namespace heddle
