// Choosing one token of one row: argmax, Gumbel-max, and the top-k, top-p and min-p filters.
//
// Rows are float32 logits after penalties and masks; -infinity is masked, NaN and +infinity have
// been refused before. Token order everywhere: highest logit first, ties by lowest id.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/sampling/sampling_params.h"

namespace heddle {

struct Candidate {
  int32_t id = -1;
  float logit = 0.0f;
  float raw_logit = 0.0f;  // before penalties: for its log-probability

  bool Before(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : id < other.id;
  }
};

// A token and what it won with.
struct ScoredToken {
  int32_t id = -1;  // -1: every token is masked
  double score = 0.0;

  // Whether `other`, whose id is higher, wins.
  bool YieldsTo(const ScoredToken& other) const {
    return other.id >= 0 && (id < 0 || other.score > score);
  }
};

// What Gumbel noise is a function of, besides the token id.
struct NoiseKey {
  uint64_t seed = 0;
  int64_t position = 0;
};

// -log(-log u) for a u in (0, 1) drawn by (key, id).
double GumbelNoise(const NoiseKey& key, int32_t id);

// `logits` belong to the ids from `first_id` on.
ScoredToken Argmax(std::span<const float> logits, int32_t first_id);

// The argmax of logit * inverse_temperature + GumbelNoise(key, id): a draw from the softmax (Gumbel
// 1954; Maddison et al. 2014, arXiv:1411.0030).
ScoredToken GumbelArgmax(std::span<const float> logits, int32_t first_id,
                         double inverse_temperature, const NoiseKey& key);
// The same over an arbitrary set.
ScoredToken GumbelArgmax(std::span<const Candidate> candidates, double inverse_temperature,
                         const NoiseKey& key);

// The first `count` of the row that are not masked, in token order.
std::vector<Candidate> TopCandidates(std::span<const float> logits, int32_t first_id,
                                     int64_t count);

// The head of a whole row in token order.
struct RankedRow {
  std::vector<Candidate> head;
  bool complete = false;  // nothing that is not masked is missing
  // Sum over the whole row of exp((logit - head[0].logit) / temperature); used by top-p alone.
  double total = 0.0;
};

// How many candidates survive min-p, then top-k, then top-p on the renormalised rest. At least one.
// Nullopt if that depends on tokens past the head.
std::optional<int64_t> CountKept(const RankedRow& row, const SamplingParams& params);

}  // namespace heddle
