// What sampling one row gave.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "runtime/sampling/token_logprob.h"

namespace heddle {

// The outcome for one row; equal on every rank.
struct SampledToken {
  absl::Status status;  // why this row has no token; batch mates are not affected
  int32_t token_id = -1;
  // If the row's parameters ask for log-probabilities: the token's, and those of the most likely
  // tokens (ties: lowest id first).
  float logprob = 0.0f;
  std::vector<TokenLogprob> top_logprobs;
};

}  // namespace heddle
