// How one request wants its tokens chosen, and when to stop.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace heddle {

// The fields and their meaning are vLLM's. temperature < 1e-5, top_k 1 or top_p 0 is greedy.
struct SamplingParams {
  // Unset: up to the context limit. 0 gives no token and finishes with "length".
  std::optional<int64_t> max_tokens = 16;
  int64_t min_tokens = 0;  // neither EOS nor a stop ends a sequence before
  double temperature = 1.0;
  int64_t top_k = 0;  // 0 or -1: all
  double top_p = 1.0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;  // over prompt and output
  double presence_penalty = 0.0;    // over output only
  double frequency_penalty = 0.0;   // over output only
  // Unset: derived from the engine's seed and the order of submission.
  std::optional<uint64_t> seed = std::nullopt;
  int64_t n = 1;          // sequences to sample from one prompt
  int64_t logprobs = -1;  // -1: none; k: the chosen token's and the k most likely ones'
  bool ignore_eos = false;
  std::vector<std::string> stop = {};
  std::vector<int32_t> stop_token_ids = {};
  bool skip_special_tokens = true;
  // The log-probability of each prompt token but the first. The prompt is then computed whole,
  // without reusing cached pages. With max_tokens 0 this scores a text and samples nothing.
  bool prompt_logprobs = false;
  bool prompt_logits = false;  // also the logits of every prompt position; implies the above

  bool IsGreedy() const { return temperature < 1e-5 || top_k == 1 || top_p <= 1e-9; }
  bool ScoresPrompt() const { return prompt_logprobs || prompt_logits; }
  bool HasPenalties() const {
    return repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
  }
};

// InvalidArgument naming the field, its value and the legal range.
absl::Status ValidateSamplingParams(const SamplingParams& params, int64_t vocab_size);

}  // namespace heddle
