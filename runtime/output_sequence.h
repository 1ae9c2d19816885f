// From sampled tokens to text, and the rules that end a sequence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/request.h"
#include "runtime/sampling/sampling_params.h"
#include "runtime/text/stop_matcher.h"
#include "runtime/text/stream_decoder.h"
#include "runtime/text/tokenizer.h"

namespace heddle {

// The output side of one of a request's n sequences. Owned by the coordinator, used from its
// thread. The text handed out, put together, is the decoded output up to a stop string.
class OutputSequence {
 public:
  struct Piece {
    std::string text;
    FinishReason finish_reason = FinishReason::kUnfinished;
  };

  // `tokenizer` may be null: then there is no text and stop strings cannot match. `eos_token_ids`
  // are the model's; `max_tokens` >= 1 is what the request and the context allow.
  OutputSequence(const SamplingParams& params, const Tokenizer* tokenizer,
                 const std::vector<int32_t>& eos_token_ids, int64_t max_tokens);

  // Takes the next sampled token. A token that ends the sequence by its id counts as output, its
  // text does not.
  Piece Push(int32_t token_id);
  // Ends the sequence for a reason of the engine's and returns the text still held back.
  Piece End(FinishReason reason);

  int64_t num_tokens() const { return num_tokens_; }

 private:
  const int64_t max_tokens_;
  const int64_t min_tokens_;
  std::vector<int32_t> stop_ids_;
  std::optional<StreamDecoder> decoder_;
  StopMatcher matcher_;
  int64_t num_tokens_ = 0;
};

}  // namespace heddle
