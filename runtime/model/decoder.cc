#include "runtime/model/decoder.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {

Decoder::Decoder(const ModelSpec& spec, const RankLayout& layout, const ModelWeights& weights,
                 DecoderOptions options, AttentionBlock attention, DenseFfnBlock dense_ffn,
                 std::optional<MoeFfnBlock> moe_ffn, Backend& backend, Communicator& communicator)
    : spec_(spec),
      layout_(layout),
      weights_(weights),
      options_(std::move(options)),
      kernels_(backend.kernels()),
      communicator_(communicator),
      attention_(std::move(attention)),
      dense_ffn_(std::move(dense_ffn)),
      moe_ffn_(std::move(moe_ffn)) {}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(const ModelSpec& spec,
                                                         const ShardLayout& layout, int rank,
                                                         const ModelWeights& weights,
                                                         DecoderOptions options, Backend& backend,
                                                         Communicator& communicator) {
  const std::vector<std::string> missing = MissingKernels(backend.kernels());
  if (!missing.empty()) {
    return absl::UnimplementedError(
        absl::StrCat("the device lacks these ops: ", absl::StrJoin(missing, ", ")));
  }
  const RankLayout& held = layout.ranks[rank];
  const StepLimits limits = options.limits;
  const auto create_attention = [&]() -> absl::StatusOr<AttentionBlock> {
    const auto create = [&]<typename Block>(std::in_place_type_t<Block>) {
      return Block::Create(spec, layout, rank, limits, options.max_model_len, options.pool,
                           options.precision, backend, communicator);
    };
    if (spec.mla.has_value()) return create(std::in_place_type<MlaAttentionBlock>);
    return create(std::in_place_type<GqaAttentionBlock>);
  };
  ASSIGN_OR_RETURN(AttentionBlock attention, create_attention());
  int64_t max_dense_columns = 0, max_expert_columns = 0;
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    const FfnShare& share = held.ffn[layer];
    const bool has_experts = HasExperts(spec, layer);
    int64_t& most = has_experts ? max_expert_columns : max_dense_columns;
    most = std::max(most, share.columns.size());
    max_dense_columns = std::max(max_dense_columns, share.shared_columns.size());
  }
  ASSIGN_OR_RETURN(DenseFfnBlock dense_ffn,
                   DenseFfnBlock::Create(max_dense_columns, limits, options.precision, backend));
  std::optional<MoeFfnBlock> moe_ffn;
  if (spec.moe.has_value()) {
    ASSIGN_OR_RETURN(MoeFfnBlock block,
                     MoeFfnBlock::Create(*spec.moe, spec.hidden_size, max_expert_columns, limits,
                                         options.precision, backend));
    moe_ffn.emplace(std::move(block));
  }
  std::unique_ptr<Decoder> decoder = absl::WrapUnique(
      new Decoder(spec, held, weights, std::move(options), std::move(attention),
                  std::move(dense_ffn), std::move(moe_ffn), backend, communicator));
  if (layout.exchanges_experts) {
    const auto layer = std::find(spec.moe->layers.begin(), spec.moe->layers.end(), true);
    const int64_t index = layer - spec.moe->layers.begin();  // they are dealt alike in all layers
    std::vector<Range> experts;
    for (const RankLayout& one : layout.ranks) experts.push_back(one.ffn[index].experts);
    ASSIGN_OR_RETURN(decoder->exchange_,
                     ExpertExchange::Create(std::move(experts), spec.moe->num_experts_per_token,
                                            spec.hidden_size, decoder->moe_ffn_->max_tokens(),
                                            communicator, backend));
  }
  const auto hidden = [&](int64_t rows) {
    return Activation::Create(rows, spec.hidden_size, backend);
  };
  ASSIGN_OR_RETURN(decoder->hidden_, hidden(limits.max_tokens));
  ASSIGN_OR_RETURN(decoder->normed_, hidden(limits.max_tokens));
  ASSIGN_OR_RETURN(decoder->partial_, hidden(limits.max_tokens));
  ASSIGN_OR_RETURN(decoder->last_hidden_, hidden(limits.max_logit_rows));
  ASSIGN_OR_RETURN(decoder->logits_,
                   Activation::Create(limits.max_logit_rows, held.vocabulary.size(), backend));
  return decoder;
}

absl::Status Decoder::Forward(const StepInputs& inputs, const StepShape& shape, Stream& stream) {
  CHECK_LE(shape.num_tokens, options_.limits.max_tokens);
  CHECK_LE(shape.num_sequences, options_.limits.max_sequences);
  num_tokens_ = shape.num_tokens;
  if (num_tokens_ == 0) return absl::OkStatus();
  // Ids of other ranks' shards give zeros.
  const MatrixView hidden = hidden_.Rows(num_tokens_);
  RETURN_IF_ERROR(kernels_.embedding({.table = weights_.embedding,
                                      .token_ids = inputs.token_ids.device(),
                                      .first_id = layout_.vocabulary.begin,
                                      .out = hidden},
                                     stream));
  RETURN_IF_ERROR(SumOverRanks(hidden_, shape, stream));
  for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
    RETURN_IF_ERROR(
        Annotate(RunLayer(layer, inputs, shape, stream), absl::StrCat("layer ", layer)));
    if (options_.on_layer) options_.on_layer();
  }
  return GatherTokens(hidden_, shape, stream);
}

absl::Status Decoder::RunLayer(int64_t layer, const StepInputs& inputs, const StepShape& shape,
                               Stream& stream) {
  const LayerWeights& weights = weights_.layers[layer];
  const MatrixView hidden = OwnRows(hidden_, shape);
  const MatrixView normed = OwnRows(normed_, shape);
  const MatrixView partial = OwnRows(partial_, shape);

  RETURN_IF_ERROR(Norm(hidden, weights.attention_norm, normed, stream));
  RETURN_IF_ERROR(Attend(layer, inputs, shape, normed, partial, stream));
  if (shape.tokens_per_rank.empty()) RETURN_IF_ERROR(SumOverRanks(partial_, shape, stream));
  RETURN_IF_ERROR(kernels_.add({.x = partial, .target = hidden}, stream));

  RETURN_IF_ERROR(Norm(hidden, weights.ffn_norm, normed, stream));
  RETURN_IF_ERROR(FeedForward(layer, shape, stream));
  RETURN_IF_ERROR(kernels_.add({.x = partial, .target = hidden}, stream));
  if (options_.tap) RETURN_IF_ERROR(options_.tap(absl::StrCat("layers.", layer, ".out"), hidden));
  return absl::OkStatus();
}

absl::Status Decoder::Attend(int64_t layer, const StepInputs& inputs, const StepShape& shape,
                             ConstMatrixView x, MatrixView out, Stream& stream) {
  const auto& weights = weights_.layers[layer].attention;
  if (auto* mla = std::get_if<MlaAttentionBlock>(&attention_)) {
    return mla->Forward(layer, std::get<MlaWeights>(weights), x, inputs, shape, out, options_.tap,
                        stream);
  }
  return std::get<GqaAttentionBlock>(attention_)
      .Forward(layer, std::get<GqaWeights>(weights), x, inputs, shape, out, options_.tap, stream);
}

absl::Status Decoder::FeedForward(int64_t layer, const StepShape& shape, Stream& stream) {
  const auto& weights = weights_.layers[layer].ffn;
  const auto* moe = std::get_if<MoeWeights>(&weights);
  if (moe != nullptr && exchange_ != nullptr) {
    return moe_ffn_->ForwardExchanged(*moe, dense_ffn_, *exchange_, OwnRows(normed_, shape),
                                      shape.tokens_per_rank, OwnRows(partial_, shape), stream);
  }
  RETURN_IF_ERROR(GatherTokens(normed_, shape, stream));
  const MatrixView x = normed_.Rows(num_tokens_);
  const MatrixView out = partial_.Rows(num_tokens_);
  RETURN_IF_ERROR(moe != nullptr
                      ? moe_ffn_->Forward(*moe, dense_ffn_, x, out, stream)
                      : dense_ffn_.Forward(std::get<DenseFfnWeights>(weights), x, out, stream));
  return SumOverRanks(partial_, shape, stream);
}

absl::StatusOr<ConstMatrixView> Decoder::Logits(const int32_t* rows, int64_t num_rows,
                                                Stream& stream) {
  CHECK_LE(num_rows, options_.limits.max_logit_rows);
  const MatrixView last_hidden = last_hidden_.Rows(num_rows);
  const MatrixView logits = logits_.Rows(num_rows);
  RETURN_IF_ERROR(kernels_.gather_rows(
      {.x = hidden_.Rows(num_tokens_), .rows = rows, .out = last_hidden}, stream));
  RETURN_IF_ERROR(Norm(last_hidden, weights_.final_norm, last_hidden, stream));
  RETURN_IF_ERROR(Project(last_hidden, {.weight = weights_.head, .bias = nullptr}, logits,
                          options_.precision, kernels_, stream));
  return logits;
}

MatrixView Decoder::OwnRows(const Activation& x, const StepShape& shape) const {
  MatrixView own = x.Rows(num_tokens_);
  own.data = own.Row<float>(shape.own_tokens.begin);
  own.rows = shape.own_tokens.size();
  return own;
}

absl::Status Decoder::SumOverRanks(const Activation& partial, const StepShape& shape,
                                   Stream& stream) {
  if (communicator_.size() == 1) return absl::OkStatus();
  const MatrixView all = partial.Rows(num_tokens_);
  if (shape.tokens_per_rank.empty()) {
    return communicator_.AllReduce(all.data, all.rows * all.cols, DType::kFloat32, ReduceOp::kSum,
                                   stream);
  }
  std::vector<int64_t> counts;
  for (const int64_t tokens : shape.tokens_per_rank) counts.push_back(tokens * all.cols);
  return communicator_.ReduceScatterV(all.data, OwnRows(partial, shape).data, counts,
                                      DType::kFloat32, stream);
}

absl::Status Decoder::GatherTokens(const Activation& x, const StepShape& shape, Stream& stream) {
  if (communicator_.size() == 1 || shape.tokens_per_rank.empty()) return absl::OkStatus();
  const MatrixView all = x.Rows(num_tokens_);
  const int64_t row_bytes = all.cols * static_cast<int64_t>(sizeof(float));
  std::vector<int64_t> bytes;
  for (const int64_t tokens : shape.tokens_per_rank) bytes.push_back(tokens * row_bytes);
  return communicator_.AllGatherV(OwnRows(x, shape).data, all.data, bytes, stream);
}

absl::Status Decoder::Norm(ConstMatrixView x, const float* weight, MatrixView out, Stream& stream) {
  return kernels_.rms_norm(
      {.x = x, .weight = weight, .epsilon = static_cast<float>(spec_.rms_norm_epsilon), .out = out},
      stream);
}

}  // namespace heddle
