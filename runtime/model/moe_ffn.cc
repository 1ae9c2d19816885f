#include "runtime/model/moe_ffn.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {
namespace {

// Tokens of a piece: with 8 of 256 experts each, 32 rows an expert, which is near the peak of a
// CPU.
constexpr int64_t kMaxPieceTokens = 1024;

// Rows [first, first + count).
template <typename View>
View RowsFrom(View x, int64_t first, int64_t count) {
  x.data = x.template Row<float>(first);
  x.rows = count;
  return x;
}

}  // namespace

absl::StatusOr<MoeFfnBlock> MoeFfnBlock::Create(const MoeSpec& spec, int64_t hidden_size,
                                                int64_t max_columns, const StepLimits& limits,
                                                ActivationPrecision precision, Backend& backend) {
  MoeFfnBlock block(spec, precision, backend);
  block.max_tokens_ = std::min(limits.max_tokens, kMaxPieceTokens);
  const int64_t max_entries = block.max_tokens_ * spec.num_experts_per_token;
  const auto numbers = [&backend](int64_t count) {
    static_assert(sizeof(int32_t) == sizeof(float));
    return backend.Allocate(static_cast<size_t>(count) * sizeof(float));
  };
  ASSIGN_OR_RETURN(block.logits_, Activation::Create(block.max_tokens_, spec.num_experts, backend));
  ASSIGN_OR_RETURN(block.expert_ids_, numbers(max_entries));
  ASSIGN_OR_RETURN(block.expert_weights_, numbers(max_entries));
  ASSIGN_OR_RETURN(block.expert_starts_, numbers(spec.num_experts + 1));
  ASSIGN_OR_RETURN(block.entry_tokens_, numbers(max_entries));
  ASSIGN_OR_RETURN(block.entry_of_, numbers(max_entries));
  ASSIGN_OR_RETURN(block.gate_, numbers(max_entries * max_columns));
  ASSIGN_OR_RETURN(block.up_, numbers(max_entries * max_columns));
  ASSIGN_OR_RETURN(block.down_, Activation::Create(max_entries, hidden_size, backend));
  return block;
}

absl::Status MoeFfnBlock::Forward(const MoeWeights& weights, DenseFfnBlock& shared_ffn,
                                  ConstMatrixView x, MatrixView out, Stream& stream) {
  const bool has_shared = spec_.shared_intermediate_size > 0;
  if (has_shared) RETURN_IF_ERROR(shared_ffn.Forward(weights.shared, x, out, stream));
  for (int64_t first = 0; first < x.rows; first += max_tokens_) {
    const int64_t count = std::min(max_tokens_, x.rows - first);
    RETURN_IF_ERROR(RunExperts(weights, RowsFrom(x, first, count), has_shared,
                               RowsFrom(out, first, count), stream));
  }
  return absl::OkStatus();
}

absl::Status MoeFfnBlock::ForwardExchanged(const MoeWeights& weights, DenseFfnBlock& shared_ffn,
                                           ExpertExchange& exchange, ConstMatrixView x,
                                           std::span<const int64_t> tokens_per_rank, MatrixView out,
                                           Stream& stream) {
  const bool has_shared = spec_.shared_intermediate_size > 0;
  if (has_shared) RETURN_IF_ERROR(shared_ffn.Forward(weights.shared, x, out, stream));
  const int64_t most = *std::max_element(tokens_per_rank.begin(), tokens_per_rank.end());
  for (int64_t round = 0; round < most; round += exchange.max_own_tokens()) {
    const int64_t first = std::min(round, x.rows);
    const int64_t count = std::min(exchange.max_own_tokens(), x.rows - first);
    const ConstMatrixView own = RowsFrom(x, first, count);
    RETURN_IF_ERROR(Route(weights, own, stream));
    ASSIGN_OR_RETURN(const ConstMatrixView received,
                     exchange.Send(own, expert_ids_.as<const int32_t>(), stream));
    // Routed again where they arrive: the router is there too, and gives the same.
    RETURN_IF_ERROR(RunExperts(weights, received, /*add=*/false, exchange.summands(), stream));
    RETURN_IF_ERROR(exchange.Return(has_shared, RowsFrom(out, first, count), stream));
  }
  return absl::OkStatus();
}

absl::Status MoeFfnBlock::RunExperts(const MoeWeights& weights, ConstMatrixView x, bool add,
                                     MatrixView out, Stream& stream) {
  RETURN_IF_ERROR(Route(weights, x, stream));
  const int64_t top_k = spec_.num_experts_per_token, max_entries = x.rows * top_k;
  const int64_t columns = weights.down.first.k;
  RETURN_IF_ERROR(kernels_.expert_dispatch({.expert_ids = expert_ids_.as<const int32_t>(),
                                            .num_tokens = x.rows,
                                            .top_k = top_k,
                                            .first_expert = weights.experts.begin,
                                            .num_experts = weights.experts.size(),
                                            .expert_starts = expert_starts_.as<int32_t>(),
                                            .entry_tokens = entry_tokens_.as<int32_t>(),
                                            .entry_of = entry_of_.as<int32_t>()},
                                           stream));
  const MatrixView gate = FloatMatrix(gate_.as<float>(), max_entries, columns);
  const MatrixView up = FloatMatrix(up_.as<float>(), max_entries, columns);
  const MatrixView down = down_.Rows(max_entries);
  const auto* entry_tokens = entry_tokens_.as<const int32_t>();
  const int32_t* num_entries = expert_starts_.as<const int32_t>() + weights.experts.size();
  RETURN_IF_ERROR(ProjectEntries(x, entry_tokens, weights.gate, gate, stream));
  RETURN_IF_ERROR(ProjectEntries(x, entry_tokens, weights.up, up, stream));
  RETURN_IF_ERROR(
      kernels_.silu_mul({.gate = gate, .up = up, .out = gate, .num_rows = num_entries}, stream));
  RETURN_IF_ERROR(ProjectEntries(gate, /*entry_tokens=*/nullptr, weights.down, down, stream));
  return kernels_.expert_combine({.y = down,
                                  .entry_of = entry_of_.as<const int32_t>(),
                                  .weights = expert_weights_.as<const float>(),
                                  .top_k = top_k,
                                  .add = add,
                                  .out = out},
                                 stream);
}

absl::Status MoeFfnBlock::Route(const MoeWeights& weights, ConstMatrixView x, Stream& stream) {
  const MatrixView logits = logits_.Rows(x.rows);
  // Never with rounded activations: a token would change its experts.
  RETURN_IF_ERROR(Project(x, {.weight = weights.router, .bias = nullptr}, logits,
                          ActivationPrecision::kFloat32, kernels_, stream));
  return kernels_.router({.logits = logits,
                          .score = spec_.score,
                          .correction_bias = weights.correction_bias,
                          .num_groups = spec_.num_groups,
                          .num_top_groups = spec_.num_top_groups,
                          .group_score = spec_.group_score,
                          .top_k = spec_.num_experts_per_token,
                          .normalise_weights = spec_.normalise_weights,
                          .scaling_factor = static_cast<float>(spec_.routed_scaling_factor),
                          .expert_ids = expert_ids_.as<int32_t>(),
                          .expert_weights = expert_weights_.as<float>()},
                         stream);
}

absl::Status MoeFfnBlock::ProjectEntries(ConstMatrixView x, const int32_t* entry_tokens,
                                         const PackedWeightStack& weights, MatrixView out,
                                         Stream& stream) {
  return kernels_.grouped_linear(
      {.x = x,
       .entry_tokens = entry_tokens,
       .expert_starts = expert_starts_.as<const int32_t>(),
       .weights = weights,
       .out = out,
       .precision =
           IsBlockQuantised(weights.first.dtype) ? precision_ : ActivationPrecision::kFloat32},
      stream);
}

}  // namespace heddle
