#include "runtime/sampling/row_choice.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "kernels/base/logging.h"
#include "runtime/sampling/exact_math.h"
#include "runtime/sampling/philox.h"
#include "runtime/sampling/row_sums.h"

namespace heddle {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0x1.62e42fefa39efp-1;

// Noise is drawn for groups of neighbouring ids: word w of the lane-th counter of a group belongs
// to its id 32 w + lane, so that words follow each other as ids do. Each id has two draws: 32 bits
// that nearly always tell whether it may win, and 20 that make its noise fine.
constexpr int kLanes = 32;
constexpr int64_t kGroupIds = int64_t{4} * kLanes;
enum class Draw : uint32_t { kHigh = 0, kLow = 1 };

std::array<uint32_t, 4> CounterOf(const NoiseKey& key, int64_t group, int lane, Draw draw) {
  const uint64_t position = static_cast<uint64_t>(key.position);
  return {static_cast<uint32_t>(group * kLanes + lane), static_cast<uint32_t>(position),
          static_cast<uint32_t>(position >> 32), static_cast<uint32_t>(draw)};
}

uint32_t DrawBits(const NoiseKey& key, int64_t id, Draw draw) {
  const int64_t index = id % kGroupIds;
  const auto counter = CounterOf(key, id / kGroupIds, static_cast<int>(index % kLanes), draw);
  return Philox4x32(counter, key.seed)[index / kLanes];
}

// The high draws of a group's ids.
std::array<uint32_t, kGroupIds> DrawGroup(const NoiseKey& key, int64_t group) {
  uint32_t words[4][kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const std::array<uint32_t, 4> counter = CounterOf(key, group, lane, Draw::kHigh);
    for (int word = 0; word < 4; ++word) words[word][lane] = counter[word];
  }
  PhiloxRounds(key.seed, words);
  std::array<uint32_t, kGroupIds> bits;
  std::memcpy(bits.data(), words, sizeof(words));
  return bits;
}

double NoiseFromBits(uint32_t high, uint32_t low) {
  // 1 - u is the middle of one of 2^52 equal steps of (0, 1); both are exact.
  const uint64_t step = uint64_t{high} << 20 | low >> 12;
  const double complement = (static_cast<double>(step) + 0.5) * 0x1p-52;
  return -ExactLog(-ExactLog(1.0 - complement));
}

// A little above the noise with these high bits, without a logarithm: -log u >= 1 - u, and the bits
// of a float x > 0, read as an integer, are at most 2^23 (127 + log2 x). The slack covers rounding.
double NoiseBound(uint32_t high) {
  const float x = static_cast<float>(static_cast<int32_t>(high >> 1));  // <= 2^31 (1 - u)
  return kLn2 * (127 + 31) - kLn2 * 0x1p-23 * std::bit_cast<int32_t>(x) + 1e-6;
}

}  // namespace

double GumbelNoise(const NoiseKey& key, int32_t id) {
  return NoiseFromBits(DrawBits(key, id, Draw::kHigh), DrawBits(key, id, Draw::kLow));
}

ScoredToken Argmax(std::span<const float> logits, int32_t first_id) {
  const float max = RowMax(logits);
  if (max == kNegativeInfinity) return {};
  const int64_t index = std::find(logits.begin(), logits.end(), max) - logits.begin();
  return {static_cast<int32_t>(first_id + index), max};
}

ScoredToken GumbelArgmax(std::span<const float> logits, int32_t first_id,
                         double inverse_temperature, const NoiseKey& key) {
  ScoredToken best = {.id = -1, .score = -std::numeric_limits<double>::infinity()};
  const int64_t end_id = first_id + static_cast<int64_t>(logits.size());
  for (int64_t group = first_id / kGroupIds; group * kGroupIds < end_id; ++group) {
    const std::array<uint32_t, kGroupIds> high = DrawGroup(key, group);
    const int64_t begin = std::max<int64_t>(group * kGroupIds, first_id);
    const int64_t end = std::min((group + 1) * kGroupIds, end_id);
    const uint32_t* const bits = &high[begin % kGroupIds];
    const float* const of_group = logits.data() + (begin - first_id);
    // Logarithms only for those few that may win.
    std::array<double, kGroupIds> bounds;
    for (int64_t i = 0; i < end - begin; ++i) {
      bounds[i] = of_group[i] * inverse_temperature + NoiseBound(bits[i]);
    }
    for (int64_t i = 0; i < end - begin; ++i) {
      if (bounds[i] < best.score || of_group[i] == kNegativeInfinity) continue;
      const int32_t id = static_cast<int32_t>(begin + i);
      const double noise = NoiseFromBits(bits[i], DrawBits(key, id, Draw::kLow));
      const ScoredToken offered{id, of_group[i] * inverse_temperature + noise};
      if (best.YieldsTo(offered)) best = offered;
    }
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
