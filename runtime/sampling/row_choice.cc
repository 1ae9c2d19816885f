#include "runtime/sampling/row_choice.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "kernels/base/logging.h"
#include "runtime/sampling/exact_math.h"
#include "runtime/sampling/philox.h"
#include "runtime/sampling/row_sums.h"

namespace heddle {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0x1.62e42fefa39efp-1;

// The random bits of the ids 2 * pair and 2 * pair + 1.
std::array<uint64_t, 2> PairBits(const NoiseKey& key, uint32_t pair) {
  const uint64_t position = static_cast<uint64_t>(key.position);
  const std::array<uint32_t, 4> words = Philox4x32(
      {pair, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0}, key.seed);
  return {uint64_t{words[0]} << 32 | words[1], uint64_t{words[2]} << 32 | words[3]};
}

// 1 - u, in (0, 1): the middles of 2^52 equal steps, all of them exact.
double Complement(uint64_t bits) { return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52; }

double Gumbel(double complement) { return -ExactLog(-ExactLog(1.0 - complement)); }

// Not below Gumbel(complement), at the price of reading an exponent: -log u >= 1 - u. The slack
// covers rounding.
double GumbelBound(double complement) {
  const int exponent = static_cast<int>(std::bit_cast<uint64_t>(complement) >> 52) - 1023;
  return -exponent * kLn2 + 1e-9;
}

}  // namespace

double GumbelNoise(const NoiseKey& key, int32_t id) {
  return Gumbel(Complement(PairBits(key, static_cast<uint32_t>(id) / 2)[id % 2]));
}

ScoredToken Argmax(std::span<const float> logits, int32_t first_id) {
  const float max = RowMax(logits);
  if (max == kNegativeInfinity) return {};
  const int64_t index = std::find(logits.begin(), logits.end(), max) - logits.begin();
  return {static_cast<int32_t>(first_id + index), max};
}

ScoredToken GumbelArgmax(std::span<const float> logits, int32_t first_id,
                         double inverse_temperature, const NoiseKey& key) {
  ScoredToken best;
  const int64_t end_id = first_id + static_cast<int64_t>(logits.size());
  const auto offer = [&](int64_t id, uint64_t bits) {
    if (id < first_id || id >= end_id) return;
    const float logit = logits[id - first_id];
    if (logit == kNegativeInfinity) return;
    const double scaled = logit * inverse_temperature;
    const double complement = Complement(bits);
    // Logarithms only for those few that may win.
    if (best.id >= 0 && scaled + GumbelBound(complement) < best.score) return;
    const ScoredToken offered{static_cast<int32_t>(id), scaled + Gumbel(complement)};
    if (best.YieldsTo(offered)) best = offered;
  };
  for (int64_t pair = first_id / 2; pair * 2 < end_id; ++pair) {
    const std::array<uint64_t, 2> bits = PairBits(key, static_cast<uint32_t>(pair));
    offer(pair * 2, bits[0]);
    offer(pair * 2 + 1, bits[1]);
  }
  return best;
}

ScoredToken GumbelArgmax(std::span<const Candidate> candidates, double inverse_temperature,
                         const NoiseKey& key) {
  ScoredToken best;
  for (const Candidate& candidate : candidates) {
    const double score = candidate.logit * inverse_temperature + GumbelNoise(key, candidate.id);
    if (best.id < 0 || score > best.score || (score == best.score && candidate.id < best.id)) {
      best = {candidate.id, score};
    }
  }
  return best;
}

std::vector<Candidate> TopCandidates(std::span<const float> logits, int32_t first_id,
                                     int64_t count) {
  std::vector<Candidate> kept;
  if (count <= 0) return kept;
  const auto before = [](const Candidate& a, const Candidate& b) { return a.Before(b); };
  const size_t wanted = static_cast<size_t>(count);
  // Whenever twice too many have gathered, the worse half goes and the bar rises. Ids ascend, so a
  // later logit equal to the bar comes after all that were kept at it.
  const size_t room = std::max<size_t>(2 * wanted, 64);
  float bar = kNegativeInfinity;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] > bar)) continue;
    kept.push_back({.id = static_cast<int32_t>(first_id + i), .logit = logits[i]});
    if (kept.size() < room) continue;
    std::nth_element(kept.begin(), kept.begin() + (wanted - 1), kept.end(), before);
    kept.resize(wanted);
    bar = kept.back().logit;
  }
  std::sort(kept.begin(), kept.end(), before);
  if (kept.size() > wanted) kept.resize(wanted);
  return kept;
}

std::optional<int64_t> CountKept(const RankedRow& row, const SamplingParams& params) {
  CHECK(!row.head.empty());
  const int64_t head_size = static_cast<int64_t>(row.head.size());
  const double inverse_temperature = 1.0 / params.temperature;
  const auto weight = [&](int64_t i) {
    return ExactExp((double{row.head[i].logit} - row.head[0].logit) * inverse_temperature);
  };
  const bool limited = params.top_k > 0 || params.min_p > 0.0;

  int64_t kept = 0;
  double kept_total = 0.0;
  bool known = row.complete;
  for (; kept < head_size; ++kept) {
    const double w = weight(kept);
    if ((params.top_k > 0 && kept == params.top_k) || w < params.min_p) {
      known = true;
      break;
    }
    kept_total += w;
  }
  known = known || kept == params.top_k;
  if (params.top_p >= 1.0) return known ? std::optional(kept) : std::nullopt;

  // The denominator must not depend on how much of the row is at hand.
  if (limited && !known) return std::nullopt;
  const double threshold = params.top_p * (limited ? kept_total : row.total);
  double cumulative = 0.0;
  for (int64_t i = 0; i < kept; ++i) {
    cumulative += weight(i);
    if (cumulative >= threshold) return i + 1;
  }
  return known ? std::optional(kept) : std::nullopt;
}

}  // namespace heddle
