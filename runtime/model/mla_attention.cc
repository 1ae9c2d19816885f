#include "runtime/model/mla_attention.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/attention/mla_prefill.h"
#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {
namespace {

// Floats of a piece's expanded keys and values, and of queries in latent space at once: 32 MiB
// each.
constexpr int64_t kMaxPieceFloats = int64_t{8} << 20;
constexpr int64_t kMaxAbsorbedFloats = int64_t{8} << 20;

PackedWeightStack Slice(const PackedWeightStack& stack, int64_t begin, int64_t count) {
  return {.first = stack.at(begin), .stride_bytes = stack.stride_bytes, .count = count};
}

// Heads [begin, begin + count), and of each head the elements [offset, offset + dim).
HeadsView Slice(const HeadsView& view, int64_t begin, int64_t count, int64_t offset, int64_t dim) {
  return {.data = view.data + begin * view.head_stride + offset,
          .tokens = view.tokens,
          .heads = count,
          .dim = dim,
          .token_stride = view.token_stride,
          .head_stride = view.head_stride};
}

constexpr KvPlaneKind kPlanes[] = {KvPlaneKind::kLatent, KvPlaneKind::kRope};

int64_t PageBytes(const KvLayout& layout, KvPlaneKind kind) {
  // All layers of MLA are alike.
  for (const KvPlaneLayout& plane : layout.GroupOf(0).planes) {
    if (plane.kind == kind) return plane.bytes_per_page;
  }
  return 0;
}

}  // namespace

int64_t MlaPieceTokens(const MlaSpec& spec, int64_t num_heads) {
  const int64_t width = std::max<int64_t>(num_heads, 1) * (spec.qk_nope_head_dim + spec.v_head_dim);
  const int64_t tokens = kMaxPieceFloats / width / kMlaPieceAlignment * kMlaPieceAlignment;
  return std::clamp(tokens, kMlaPieceAlignment, 64 * kMlaPieceAlignment);
}

MlaAttentionBlock::MlaAttentionBlock(const ModelSpec& spec, const RankLayout& layout,
                                     RotaryTable rotary, const PagePool* pool,
                                     ActivationPrecision precision, Backend& backend)
    : spec_(spec),
      mla_(*spec.mla),
      kernels_(backend.kernels()),
      pool_(pool),
      precision_(precision),
      num_heads_(layout.heads.query_heads.size()),
      holds_latents_(!layout.heads.kv_heads.empty()),
      scale_(static_cast<float>(AttentionScale(spec))),
      rotary_(std::move(rotary)) {}

absl::StatusOr<MlaAttentionBlock> MlaAttentionBlock::Create(
    const ModelSpec& spec, const ShardLayout& layout, int rank, const StepLimits& limits,
    int64_t max_model_len, const PagePool* pool, ActivationPrecision precision, Backend& backend,
    Communicator& communicator) {
  ASSIGN_OR_RETURN(RotaryTable rotary, RotaryTable::Create(spec.rope, max_model_len, backend));
  MlaAttentionBlock block(spec, layout.ranks[rank], std::move(rotary), pool, precision, backend);
  const MlaSpec& mla = block.mla_;
  const int64_t heads = block.num_heads_, tokens = limits.max_tokens;
  const int64_t piece = limits.max_piece_tokens;
  // At least one head of all tokens.
  block.max_absorbed_rows_ =
      std::min(tokens * heads, std::max(tokens, kMaxAbsorbedFloats / mla.kv_lora_rank));
  const int64_t latent_width = mla.kv_lora_rank + mla.qk_rope_head_dim;
  const auto make = [&backend](int64_t rows, int64_t cols) {
    return Activation::Create(rows, cols, backend);
  };
  ASSIGN_OR_RETURN(block.q_a_, make(tokens, mla.q_lora_rank));
  ASSIGN_OR_RETURN(block.q_, make(tokens, heads * spec.head_dim));
  ASSIGN_OR_RETURN(block.kv_a_, make(tokens, latent_width));
  ASSIGN_OR_RETURN(block.absorbed_q_, make(block.max_absorbed_rows_, latent_width));
  ASSIGN_OR_RETURN(block.latent_out_, make(block.max_absorbed_rows_, mla.kv_lora_rank));
  ASSIGN_OR_RETURN(block.piece_latent_, make(piece, mla.kv_lora_rank));
  ASSIGN_OR_RETURN(block.piece_rope_, make(piece, mla.qk_rope_head_dim));
  ASSIGN_OR_RETURN(block.piece_expanded_,
                   make(piece, heads * (mla.qk_nope_head_dim + mla.v_head_dim)));
  ASSIGN_OR_RETURN(block.maximum_, make(tokens, heads));
  ASSIGN_OR_RETURN(block.sum_, make(tokens, heads));
  ASSIGN_OR_RETURN(block.attended_, make(tokens, heads * mla.v_head_dim));
  const int64_t stripes = layout.grid.num_stripes();
  if (pool == nullptr || stripes == 1 || layout.grid.data_parallel()) return block;

  // At least one head of each rank for all tokens; equal on all ranks of the group.
  const int64_t max_rows = std::max(tokens * stripes, kMaxAbsorbedFloats / latent_width);
  ASSIGN_OR_RETURN(block.stripes_, StripeExchange::Create(layout.grid, rank, max_rows, latent_width,
                                                          mla.kv_lora_rank, communicator, backend));
  ASSIGN_OR_RETURN(block.group_log_sum_exp_, make(max_rows, 1));
  for (const KvPlaneKind kind : kPlanes) {
    const int64_t bytes = limits.max_piece_pages * PageBytes(pool->layout(), kind);
    ASSIGN_OR_RETURN(block.piece_pages_[kind == KvPlaneKind::kRope],
                     backend.Allocate(static_cast<size_t>(bytes)));
  }
  return block;
}

absl::Status MlaAttentionBlock::Forward(int64_t layer, const MlaWeights& weights, ConstMatrixView x,
                                        const StepInputs& inputs, const StepShape& shape,
                                        MatrixView out, const Tap& tap, Stream& stream) {
  const int64_t tokens = x.rows;
  if (holds_latents_) {
    RETURN_IF_ERROR(ProjectInputs(weights, x, inputs, stream));
    if (pool_ != nullptr) RETURN_IF_ERROR(Append(layer, inputs, tokens, stream));
    RETURN_IF_ERROR(AttendAbsorbed(layer, weights, inputs, shape, stream));
    RETURN_IF_ERROR(AttendExpanded(layer, weights, inputs, shape, stream));
    if (tap) {
      RETURN_IF_ERROR(tap(absl::StrCat("layers.", layer, ".queries"), q_.Rows(tokens)));
      RETURN_IF_ERROR(tap(absl::StrCat("layers.", layer, ".latents"), kv_a_.Rows(tokens)));
      RETURN_IF_ERROR(tap(absl::StrCat("layers.", layer, ".attended"), attended_.Rows(tokens)));
    }
  }
  return Project(attended_.Rows(tokens), weights.o, out, precision_, kernels_, stream);
}

absl::Status MlaAttentionBlock::ProjectInputs(const MlaWeights& weights, ConstMatrixView x,
                                              const StepInputs& inputs, Stream& stream) {
  const MatrixView q = q_.Rows(x.rows);
  if (mla_.q_lora_rank > 0) {
    const MatrixView q_a = q_a_.Rows(x.rows);
    RETURN_IF_ERROR(Project(x, weights.q_a, q_a, precision_, kernels_, stream));
    RETURN_IF_ERROR(Norm(q_a, weights.q_a_norm, stream));
    RETURN_IF_ERROR(Project(q_a, weights.q_b, q, precision_, kernels_, stream));
  } else {
    RETURN_IF_ERROR(Project(x, weights.q_b, q, precision_, kernels_, stream));
  }
  const MatrixView kv_a = kv_a_.Rows(x.rows);
  RETURN_IF_ERROR(Project(x, weights.kv_a, kv_a, precision_, kernels_, stream));
  RETURN_IF_ERROR(Norm(Latents(x.rows), weights.kv_a_norm, stream));
  const int32_t* positions = inputs.positions.device();
  RETURN_IF_ERROR(rotary_.Rotate(q, num_heads_, spec_.head_dim, positions, stream));
  return rotary_.Rotate(kv_a, 1, kv_a.cols, positions, stream);
}

absl::Status MlaAttentionBlock::Append(int64_t layer, const StepInputs& inputs, int64_t tokens,
                                       Stream& stream) {
  return kernels_.latent_append({.latent = Latents(tokens),
                                 .rope = RotatedKeys(tokens),
                                 .latent_plane = pool_->Plane(layer, KvPlaneKind::kLatent),
                                 .rope_plane = pool_->Plane(layer, KvPlaneKind::kRope),
                                 .page_size = pool_->layout().page_size(),
                                 .slots = inputs.append_slots.device(),
                                 .page_offsets = inputs.append_offsets.device()},
                                stream);
}

absl::Status MlaAttentionBlock::AttendAbsorbed(int64_t layer, const MlaWeights& weights,
                                               const StepInputs& inputs, const StepShape& shape,
                                               Stream& stream) {
  const int64_t tokens = shape.num_absorbed_tokens;
  if (tokens == 0) return absl::OkStatus();
  const int64_t latent_dim = mla_.kv_lora_rank, rope_dim = mla_.qk_rope_head_dim;
  const HeadsView q = TokenMajor(q_.Rows(tokens).Row<float>(0), tokens, num_heads_, spec_.head_dim);
  const HeadsView attended =
      TokenMajor(attended_.Rows(tokens).Row<float>(0), tokens, num_heads_, mla_.v_head_dim);
  // As many heads at once as there is room for in latent space; all ranks of a stripe group go
  // through as many rounds.
  const int64_t max_heads = stripes_ != nullptr ? stripes_->max_heads() : num_heads_;
  const int64_t round = stripes_ != nullptr ? stripes_->HeadsOfRound(tokens)
                                            : std::min(num_heads_, max_absorbed_rows_ / tokens);
  for (int64_t head = 0; head < max_heads; head += round) {
    const int64_t heads = std::clamp<int64_t>(num_heads_ - head, 0, round);
    const HeadsView queries = HeadMajor(absorbed_q_.Rows(heads * tokens).Row<float>(0), tokens,
                                        heads, latent_dim + rope_dim);
    const HeadsView out =
        HeadMajor(latent_out_.Rows(heads * tokens).Row<float>(0), tokens, heads, latent_dim);
    RETURN_IF_ERROR(kernels_.head_linear({.x = Slice(q, head, heads, 0, mla_.qk_nope_head_dim),
                                          .weights = Slice(weights.absorbed_k, head, heads),
                                          .out = Slice(queries, 0, heads, 0, latent_dim)},
                                         stream));
    RETURN_IF_ERROR(
        kernels_.copy_heads({.x = Slice(q, head, heads, mla_.qk_nope_head_dim, rope_dim),
                             .out = Slice(queries, 0, heads, latent_dim, rope_dim)},
                            stream));
    if (stripes_ != nullptr) {
      RETURN_IF_ERROR(AttendWithGroup(layer, queries, head, round, inputs, shape, out, stream));
    } else {
      RETURN_IF_ERROR(AttendToLatents(layer, queries, inputs, shape, out, nullptr, stream));
    }
    RETURN_IF_ERROR(kernels_.head_linear({.x = out,
                                          .weights = Slice(weights.absorbed_v, head, heads),
                                          .out = Slice(attended, head, heads, 0, mla_.v_head_dim)},
                                         stream));
  }
  return absl::OkStatus();
}

absl::Status MlaAttentionBlock::AttendWithGroup(int64_t layer, ConstHeadsView queries,
                                                int64_t first_head, int64_t max_heads,
                                                const StepInputs& inputs, const StepShape& shape,
                                                HeadsView out, Stream& stream) {
  ASSIGN_OR_RETURN(const ConstHeadsView gathered,
                   stripes_->GatherQueries(queries, first_head, max_heads, stream));
  const int64_t rows = gathered.heads * gathered.tokens;
  float* log_sum_exp = group_log_sum_exp_.Rows(rows).Row<float>(0);
  RETURN_IF_ERROR(AttendToLatents(layer, gathered, inputs, shape, stripes_->partial_out(),
                                  log_sum_exp, stream));
  RETURN_IF_ERROR(
      kernels_.copy_heads({.x = HeadMajor(log_sum_exp, gathered.tokens, gathered.heads, 1),
                           .out = stripes_->partial_log_sum_exp()},
                          stream));
  return stripes_->Merge(out, stream);
}

absl::Status MlaAttentionBlock::AttendToLatents(int64_t layer, ConstHeadsView queries,
                                                const StepInputs& inputs, const StepShape& shape,
                                                HeadsView out, float* log_sum_exp, Stream& stream) {
  ConstHeadsView q_latent = queries, q_rope = queries;
  q_latent.dim = mla_.kv_lora_rank;
  q_rope.data += mla_.kv_lora_rank;
  q_rope.dim = mla_.qk_rope_head_dim;
  return kernels_.mla_decode({.q_latent = q_latent,
                              .q_rope = q_rope,
                              .kv = Pages(layer, inputs),
                              .num_sequences = shape.num_absorbed_sequences,
                              .query_starts = inputs.query_starts.device(),
                              .positions = inputs.positions.device(),
                              .scale = scale_,
                              .out = out,
                              .log_sum_exp = log_sum_exp},
                             stream);
}

absl::Status MlaAttentionBlock::AttendExpanded(int64_t layer, const MlaWeights& weights,
                                               const StepInputs& inputs, const StepShape& shape,
                                               Stream& stream) {
  const int64_t tokens = shape.own_tokens.size();
  const int64_t expanded_dim = mla_.qk_nope_head_dim + mla_.v_head_dim;
  for (const ContextPiece& piece : shape.pieces) {
    const int32_t* query_starts = inputs.query_starts.device() + piece.first_sequence;
    const int32_t* segment_starts = inputs.segment_starts.device() + piece.segment_starts;
    const int32_t* segment_positions = inputs.segment_positions.device() + piece.segment_positions;
    ASSIGN_OR_RETURN(const PagedLatentView pages, PiecePages(layer, piece, inputs, stream));
    if (num_heads_ == 0) continue;
    const MatrixView latent = piece_latent_.Rows(piece.num_tokens);
    const MatrixView rope = piece_rope_.Rows(piece.num_tokens);
    const MatrixView expanded = piece_expanded_.Rows(piece.num_tokens);
    RETURN_IF_ERROR(kernels_.latent_gather({.pages = pages,
                                            .local_latent = Latents(tokens),
                                            .local_rope = RotatedKeys(tokens),
                                            .num_sequences = piece.num_sequences,
                                            .query_starts = query_starts,
                                            .positions = inputs.positions.device(),
                                            .segment_starts = segment_starts,
                                            .segment_positions = segment_positions,
                                            .latent = latent,
                                            .rope = rope},
                                           stream));
    // Never with rounded activations: the absorbed path has none.
    RETURN_IF_ERROR(Project(latent, {.weight = weights.kv_b, .bias = nullptr}, expanded,
                            ActivationPrecision::kFloat32, kernels_, stream));
    RETURN_IF_ERROR(kernels_.mla_prefill(
        {.q = TokenMajor(q_.Rows(tokens).Row<float>(0), tokens, num_heads_, spec_.head_dim),
         .expanded = TokenMajor(expanded.Row<float>(0), piece.num_tokens, num_heads_, expanded_dim),
         .k_rope = rope,
         .num_sequences = piece.num_sequences,
         .segment_starts = segment_starts,
         .segment_first_positions = segment_positions,
         .query_starts = query_starts,
         .positions = inputs.positions.device(),
         .scale = scale_,
         .maximum = maximum_.Rows(tokens).Row<float>(0),
         .sum = sum_.Rows(tokens).Row<float>(0),
         .out =
             TokenMajor(attended_.Rows(tokens).Row<float>(0), tokens, num_heads_, mla_.v_head_dim),
         .first = piece.first,
         .last = piece.last},
        stream));
  }
  return absl::OkStatus();
}

absl::StatusOr<PagedLatentView> MlaAttentionBlock::PiecePages(int64_t layer,
                                                              const ContextPiece& piece,
                                                              const StepInputs& inputs,
                                                              Stream& stream) {
  PagedLatentView pages = Pages(layer, inputs);
  if (stripes_ == nullptr) {
    pages.page_starts += piece.first_sequence;
    return pages;
  }
  const int own = stripes_->group().rank();
  int64_t first_own = 0;
  for (int stripe = 0; stripe < own; ++stripe) first_own += piece.pages_per_stripe[stripe];
  for (const KvPlaneKind kind : kPlanes) {
    KvPlane& plane = kind == KvPlaneKind::kLatent ? pages.latent : pages.rope;
    const int64_t page_bytes = PageBytes(pool_->layout(), kind);
    auto* gathered = piece_pages_[kind == KvPlaneKind::kRope].as<std::byte>();
    const KvPlane target = {.data = gathered,
                            .dtype = plane.dtype,
                            .slot_stride = page_bytes / BlockBytes(plane.dtype),
                            .head_stride = page_bytes / BlockBytes(plane.dtype)};
    RETURN_IF_ERROR(
        kernels_.kv_copy_pages({.source = plane,
                                .target = target,
                                .bytes_per_page = page_bytes,
                                .source_slots = inputs.own_page_sources.device() + piece.own_pages,
                                .target_slots = inputs.own_page_targets.device() + piece.own_pages,
                                .num_pages = piece.pages_per_stripe[own]},
                               stream));
    std::vector<int64_t> bytes;
    for (const int64_t count : piece.pages_per_stripe) bytes.push_back(count * page_bytes);
    RETURN_IF_ERROR(
        stripes_->group().AllGatherV(gathered + first_own * page_bytes, gathered, bytes, stream));
    plane = target;
  }
  pages.page_starts = inputs.piece_page_starts.device() + piece.page_starts;
  pages.pages = inputs.piece_pages.device() + piece.pages;
  return pages;
}

absl::Status MlaAttentionBlock::Norm(MatrixView x, const float* weight, Stream& stream) {
  return kernels_.rms_norm({.x = x,
                            .weight = weight,
                            .epsilon = static_cast<float>(MlaSpec::kLatentNormEpsilon),
                            .out = x},
                           stream);
}

PagedLatentView MlaAttentionBlock::Pages(int64_t layer, const StepInputs& inputs) const {
  PagedLatentView view = {.latent = {},
                          .rope = {},
                          .kv_lora_rank = mla_.kv_lora_rank,
                          .rope_dim = mla_.qk_rope_head_dim,
                          .page_size = 0,
                          .page_starts = inputs.page_starts.device(),
                          .pages = inputs.pages.device()};
  if (pool_ != nullptr) {
    view.latent = pool_->Plane(layer, KvPlaneKind::kLatent);
    view.rope = pool_->Plane(layer, KvPlaneKind::kRope);
    view.page_size = pool_->layout().page_size();
  }
  return view;
}

MatrixView MlaAttentionBlock::Latents(int64_t tokens) const {
  MatrixView view = kv_a_.Rows(tokens);
  view.cols = mla_.kv_lora_rank;
  return view;
}

MatrixView MlaAttentionBlock::RotatedKeys(int64_t tokens) const {
  MatrixView view = kv_a_.Rows(tokens);
  view.data = view.Row<float>(0) + mla_.kv_lora_rank;
  view.cols = mla_.qk_rope_head_dim;
  return view;
}

}  // namespace heddle
