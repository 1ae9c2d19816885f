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
                 DecoderOptions options, GqaAttentionBlock attention, DenseFfnBlock ffn,
                 Backend& backend, Communicator& communicator)
    : spec_(spec),
      layout_(layout),
      weights_(weights),
      options_(std::move(options)),
      kernels_(backend.kernels()),
      communicator_(communicator),
      attention_(std::move(attention)),
      ffn_(std::move(ffn)) {}

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
  ASSIGN_OR_RETURN(GqaAttentionBlock attention,
                   GqaAttentionBlock::Create(spec, held, limits, options.max_model_len,
                                             options.pool, options.precision, backend));
  int64_t max_columns = 0;
  for (const Range& columns : held.ffn_columns) {
    max_columns = std::max(max_columns, columns.size());
  }
  ASSIGN_OR_RETURN(DenseFfnBlock ffn,
                   DenseFfnBlock::Create(max_columns, limits, options.precision, backend));
  std::unique_ptr<Decoder> decoder =
      absl::WrapUnique(new Decoder(spec, held, weights, std::move(options), std::move(attention),
                                   std::move(ffn), backend, communicator));
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
  RETURN_IF_ERROR(SumOverRanks(hidden, stream));
  for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
    RETURN_IF_ERROR(
        Annotate(RunLayer(layer, inputs, shape, stream), absl::StrCat("layer ", layer)));
    if (options_.on_layer) options_.on_layer();
  }
  return absl::OkStatus();
}

absl::Status Decoder::RunLayer(int64_t layer, const StepInputs& inputs, const StepShape& shape,
                               Stream& stream) {
  const LayerWeights& weights = weights_.layers[layer];
  const MatrixView hidden = hidden_.Rows(num_tokens_);
  const MatrixView normed = normed_.Rows(num_tokens_);
  const MatrixView partial = partial_.Rows(num_tokens_);

  RETURN_IF_ERROR(Norm(hidden, weights.attention_norm, normed, stream));
  RETURN_IF_ERROR(
      attention_.Forward(layer, weights, normed, inputs, shape, partial, options_.tap, stream));
  RETURN_IF_ERROR(SumOverRanks(partial, stream));
  RETURN_IF_ERROR(kernels_.add({.x = partial, .target = hidden}, stream));

  RETURN_IF_ERROR(Norm(hidden, weights.ffn_norm, normed, stream));
  RETURN_IF_ERROR(ffn_.Forward(weights.ffn, normed, partial, stream));
  RETURN_IF_ERROR(SumOverRanks(partial, stream));
  RETURN_IF_ERROR(kernels_.add({.x = partial, .target = hidden}, stream));
  if (options_.tap) RETURN_IF_ERROR(options_.tap(absl::StrCat("layers.", layer, ".out"), hidden));
  return absl::OkStatus();
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

absl::Status Decoder::SumOverRanks(MatrixView partial, Stream& stream) {
  if (communicator_.size() == 1) return absl::OkStatus();
  return communicator_.AllReduce(partial.data, partial.rows * partial.cols, DType::kFloat32,
                                 ReduceOp::kSum, stream);
}

absl::Status Decoder::Norm(ConstMatrixView x, const float* weight, MatrixView out, Stream& stream) {
  return kernels_.rms_norm(
      {.x = x, .weight = weight, .epsilon = static_cast<float>(spec_.rms_norm_epsilon), .out = out},
      stream);
}

}  // namespace heddle
