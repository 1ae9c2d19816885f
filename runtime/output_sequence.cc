#include "runtime/output_sequence.h"

#include <algorithm>
#include <utility>

namespace heddle {

absl::string_view FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kUnfinished:
      return "";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return "";
}

OutputSequence::OutputSequence(const SamplingParams& params, const Tokenizer* tokenizer,
                               const std::vector<int32_t>& eos_token_ids, int64_t max_tokens)
    : max_tokens_(max_tokens),
      min_tokens_(params.min_tokens),
      stop_ids_(params.stop_token_ids),
      matcher_(params.stop) {
  if (!params.ignore_eos) {
    stop_ids_.insert(stop_ids_.end(), eos_token_ids.begin(), eos_token_ids.end());
  }
  if (tokenizer != nullptr) {
    decoder_.emplace(tokenizer, params.skip_special_tokens);
    const std::vector<int32_t> special = SpecialStopIds(*tokenizer, params.stop);
    stop_ids_.insert(stop_ids_.end(), special.begin(), special.end());
  }
}

OutputSequence::Piece OutputSequence::Push(int32_t token_id) {
  ++num_tokens_;
  const bool may_stop = num_tokens_ >= min_tokens_;
  if (may_stop && std::find(stop_ids_.begin(), stop_ids_.end(), token_id) != stop_ids_.end()) {
    return End(FinishReason::kStop);
  }
  Piece piece;
  if (decoder_.has_value()) {
    piece.text = matcher_.Push(decoder_->Push(token_id), may_stop);
    if (matcher_.matched().has_value()) {
      piece.finish_reason = FinishReason::kStop;
      return piece;
    }
  }
  if (num_tokens_ >= max_tokens_) {
    Piece end = End(FinishReason::kLength);
    piece.text += end.text;
    piece.finish_reason = end.finish_reason;
  }
  return piece;
}

OutputSequence::Piece OutputSequence::End(FinishReason reason) {
  Piece piece{"", reason};
  if (!decoder_.has_value() || matcher_.matched().has_value()) return piece;
  // The last bytes may still complete a stop string.
  piece.text = matcher_.Push(decoder_->Flush(), num_tokens_ >= min_tokens_);
  if (matcher_.matched().has_value()) {
    if (reason == FinishReason::kLength) piece.finish_reason = FinishReason::kStop;
  } else {
    piece.text += matcher_.Flush();
  }
  return piece;
}

}  // namespace heddle
