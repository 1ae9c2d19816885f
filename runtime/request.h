// What goes into the engine and what comes out.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "runtime/sampling/sampling_params.h"
#include "runtime/sampling/token_logprob.h"

namespace heddle {

struct Request {
  std::string id;  // unique among the requests in flight
  // Text, encoded with the tokenizer's special tokens, or token ids as they are.
  std::variant<std::string, std::vector<int32_t>> prompt;
  SamplingParams params;
};

enum class FinishReason { kUnfinished, kStop, kLength, kAbort, kError };
// "stop", "length", "abort", "error"; empty while unfinished.
absl::string_view FinishReasonName(FinishReason reason);

struct PositionLogprobs {
  TokenLogprob chosen;
  std::vector<TokenLogprob> top;  // most likely first
};

// What one step added to one sequence of a request. The last one of a sequence carries a finish
// reason; the last one of a request is the last of its n sequences.
struct RequestOutput {
  std::string id;
  int64_t index = 0;  // which of the request's n sequences
  std::vector<int32_t> token_ids;
  std::string text;                        // complete code points, cut before a stop string
  std::vector<PositionLogprobs> logprobs;  // one a token, if asked for
  FinishReason finish_reason = FinishReason::kUnfinished;
  absl::Status error;  // why, for kError

  // Set on the first output of a sequence.
  std::vector<int32_t> prompt_token_ids;
  int64_t cached_tokens = 0;  // prompt tokens found in the prefix cache
  // Set on the first output, if asked for: [prompt_length] log-probabilities, the first unused,
  // and [prompt_length, vocab_size] logits.
  std::vector<float> prompt_logprobs;
  std::vector<float> prompt_logits;
};

}  // namespace heddle
