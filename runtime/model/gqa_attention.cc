#include "runtime/model/gqa_attention.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {

GqaAttentionBlock::GqaAttentionBlock(const ModelSpec& spec, const RankLayout& layout,
                                     RotaryTable rotary, const PagePool* pool,
                                     ActivationPrecision precision, Backend& backend)
    : spec_(spec),
      kernels_(backend.kernels()),
      pool_(pool),
      precision_(precision),
      query_heads_(layout.heads.query_heads.size()),
      kv_heads_(layout.heads.kv_heads.size()),
      rotary_(std::move(rotary)) {}

absl::StatusOr<GqaAttentionBlock> GqaAttentionBlock::Create(
    const ModelSpec& spec, const ShardLayout& layout, int rank, const StepLimits& limits,
    int64_t max_model_len, const PagePool* pool, ActivationPrecision precision, Backend& backend,
    Communicator& communicator) {
  ASSIGN_OR_RETURN(RotaryTable rotary, RotaryTable::Create(spec.rope, max_model_len, backend));
  GqaAttentionBlock block(spec, layout.ranks[rank], std::move(rotary), pool, precision, backend);
  const auto activation = [&](int64_t heads) {
    return Activation::Create(limits.max_tokens, heads * spec.head_dim, backend);
  };
  ASSIGN_OR_RETURN(block.q_, activation(block.query_heads_));
  ASSIGN_OR_RETURN(block.k_, activation(block.kv_heads_));
  ASSIGN_OR_RETURN(block.v_, activation(block.kv_heads_));
  ASSIGN_OR_RETURN(block.attended_, activation(block.query_heads_));
  if (pool == nullptr || layout.grid.num_stripes() == 1) return block;

  const int64_t group_heads = layout.ranks[rank].heads.group_query_heads.size();
  const int64_t stripes = layout.grid.num_stripes();
  const int64_t heads_of_one = (group_heads + stripes - 1) / stripes;
  ASSIGN_OR_RETURN(
      block.stripes_,
      StripeExchange::Create(layout.grid, rank, limits.max_tokens * stripes * heads_of_one,
                             spec.head_dim, spec.head_dim, communicator, backend));
  block.group_heads_ = group_heads;
  ASSIGN_OR_RETURN(block.group_q_, activation(group_heads));
  ASSIGN_OR_RETURN(block.group_out_, activation(group_heads));
  ASSIGN_OR_RETURN(block.group_log_sum_exp_,
                   Activation::Create(limits.max_tokens, group_heads, backend));
  return block;
}

absl::Status GqaAttentionBlock::Forward(int64_t layer, const GqaWeights& weights, ConstMatrixView x,
                                        const StepInputs& inputs, const StepShape& shape,
                                        MatrixView out, const Tap& tap, Stream& stream) {
  const int64_t tokens = shape.num_tokens;
  const MatrixView q = q_.Rows(tokens);
  const MatrixView k = k_.Rows(tokens);
  const MatrixView v = v_.Rows(tokens);
  // In a stripe group a rank without query heads still holds pages for the others.
  if (kv_heads_ > 0) {
    RETURN_IF_ERROR(Project(x, weights.q, q, precision_, kernels_, stream));
    RETURN_IF_ERROR(Project(x, weights.k, k, precision_, kernels_, stream));
    RETURN_IF_ERROR(Project(x, weights.v, v, precision_, kernels_, stream));
    RETURN_IF_ERROR(NormHeads(weights.q_norm, q, query_heads_, stream));
    RETURN_IF_ERROR(NormHeads(weights.k_norm, k, kv_heads_, stream));
    const int32_t* positions = inputs.positions.device();
    RETURN_IF_ERROR(rotary_.Rotate(q, query_heads_, spec_.head_dim, positions, stream));
    RETURN_IF_ERROR(rotary_.Rotate(k, kv_heads_, spec_.head_dim, positions, stream));
    RETURN_IF_ERROR(Attend(layer, inputs, shape, stream));
    if (tap) {
      RETURN_IF_ERROR(tap(absl::StrCat("layers.", layer, ".queries"), q));
      RETURN_IF_ERROR(tap(absl::StrCat("layers.", layer, ".keys"), k));
      RETURN_IF_ERROR(tap(absl::StrCat("layers.", layer, ".attended"), attended_.Rows(tokens)));
    }
  }
  return Project(attended_.Rows(tokens), weights.o, out, precision_, kernels_, stream);
}

absl::Status GqaAttentionBlock::Attend(int64_t layer, const StepInputs& inputs,
                                       const StepShape& shape, Stream& stream) {
  const int64_t tokens = shape.num_tokens;
  const float scale = static_cast<float>(AttentionScale(spec_));
  if (pool_ == nullptr) {
    return kernels_.dense_attention({.q = q_.Rows(tokens),
                                     .k = k_.Rows(tokens),
                                     .v = v_.Rows(tokens),
                                     .num_query_heads = query_heads_,
                                     .num_kv_heads = kv_heads_,
                                     .head_dim = spec_.head_dim,
                                     .num_sequences = shape.num_sequences,
                                     .query_starts = inputs.query_starts.device(),
                                     .scale = scale,
                                     .window = spec_.windows[layer],
                                     .out = attended_.Rows(tokens)},
                                    stream);
  }
  const KvPlane k_plane = pool_->Plane(layer, KvPlaneKind::kKey);
  const KvPlane v_plane = pool_->Plane(layer, KvPlaneKind::kValue);
  const int64_t page_size = pool_->layout().page_size();
  RETURN_IF_ERROR(kernels_.kv_append({.k = k_.Rows(tokens),
                                      .v = v_.Rows(tokens),
                                      .k_plane = k_plane,
                                      .v_plane = v_plane,
                                      .num_kv_heads = kv_heads_,
                                      .head_dim = spec_.head_dim,
                                      .page_size = page_size,
                                      .slots = inputs.append_slots.device(),
                                      .page_offsets = inputs.append_offsets.device()},
                                     stream));
  if (stripes_ != nullptr) return AttendWithGroup(layer, inputs, shape, stream);
  return AttendToPages(layer, q_.Rows(tokens), query_heads_, inputs, shape, attended_.Rows(tokens),
                       /*log_sum_exp=*/nullptr, stream);
}

absl::Status GqaAttentionBlock::AttendWithGroup(int64_t layer, const StepInputs& inputs,
                                                const StepShape& shape, Stream& stream) {
  const int64_t tokens = shape.num_tokens, head_dim = spec_.head_dim;
  const auto by_head = [&](const Activation& activation, int64_t heads) {
    return TokenMajor(activation.Rows(tokens).Row<float>(0), tokens, heads, head_dim);
  };
  ASSIGN_OR_RETURN(const ConstHeadsView gathered,
                   stripes_->GatherQueries(by_head(q_, query_heads_), /*first=*/0,
                                           /*count=*/stripes_->max_heads(), stream));
  RETURN_IF_ERROR(
      kernels_.copy_heads({.x = gathered, .out = by_head(group_q_, group_heads_)}, stream));
  float* log_sum_exp = group_log_sum_exp_.Rows(tokens).Row<float>(0);
  RETURN_IF_ERROR(AttendToPages(layer, group_q_.Rows(tokens), group_heads_, inputs, shape,
                                group_out_.Rows(tokens), log_sum_exp, stream));
  RETURN_IF_ERROR(kernels_.copy_heads(
      {.x = by_head(group_out_, group_heads_), .out = stripes_->partial_out()}, stream));
  RETURN_IF_ERROR(kernels_.copy_heads({.x = TokenMajor(log_sum_exp, tokens, group_heads_, 1),
                                       .out = stripes_->partial_log_sum_exp()},
                                      stream));
  return stripes_->Merge(by_head(attended_, query_heads_), stream);
}

absl::Status GqaAttentionBlock::AttendToPages(int64_t layer, ConstMatrixView q, int64_t num_heads,
                                              const StepInputs& inputs, const StepShape& shape,
                                              MatrixView out, float* log_sum_exp, Stream& stream) {
  return kernels_.gqa_attention({.q = q,
                                 .kv = {.k = pool_->Plane(layer, KvPlaneKind::kKey),
                                        .v = pool_->Plane(layer, KvPlaneKind::kValue),
                                        .num_kv_heads = kv_heads_,
                                        .head_dim = spec_.head_dim,
                                        .page_size = pool_->layout().page_size(),
                                        .page_starts = inputs.page_starts.device(),
                                        .pages = inputs.pages.device()},
                                 .num_query_heads = num_heads,
                                 .num_sequences = shape.num_sequences,
                                 .query_starts = inputs.query_starts.device(),
                                 .positions = inputs.positions.device(),
                                 .scale = static_cast<float>(AttentionScale(spec_)),
                                 .window = spec_.windows[layer],
                                 .out = out,
                                 .log_sum_exp = log_sum_exp},
                                stream);
}

absl::Status GqaAttentionBlock::NormHeads(const float* weight, MatrixView x, int64_t num_heads,
                                          Stream& stream) {
  if (weight == nullptr) return absl::OkStatus();
  const MatrixView heads =
      FloatMatrix(static_cast<float*>(x.data), x.rows * num_heads, spec_.head_dim);
  return kernels_.rms_norm({.x = heads,
                            .weight = weight,
                            .epsilon = static_cast<float>(spec_.rms_norm_epsilon),
                            .out = heads},
                           stream);
}

}  // namespace heddle
