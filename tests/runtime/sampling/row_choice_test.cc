#include "runtime/sampling/row_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/sampling/row_sums.h"

namespace heddle {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Few distinct values, so that ties are common.
std::vector<float> LogitsWithTies(int64_t size, std::mt19937& random) {
  std::vector<float> logits(size);
  for (float& x : logits) x = static_cast<float>(static_cast<int>(random() % 9)) - 4.0f;
  return logits;
}

std::vector<Candidate> Sorted(const std::vector<float>& logits) {
  std::vector<Candidate> all;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] != -kInfinity) all.push_back({.id = static_cast<int32_t>(i), .logit = logits[i]});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.logit > b.logit; });
  return all;
}

TEST(Argmax, TiesGoToTheLowestIdAndMaskedNeverWin) {
  EXPECT_EQ(Argmax(std::vector<float>{1, 3, 3, 2}, 10).id, 11);
  EXPECT_EQ(Argmax(std::vector<float>{-kInfinity, -5}, 0).id, 1);
  EXPECT_EQ(Argmax(std::vector<float>{-kInfinity, -kInfinity}, 0).id, -1);
  EXPECT_EQ(Argmax({}, 7).id, -1);
  std::mt19937 random(5);
  for (const int64_t size : {1, 5, 31, 33, 259, 40001}) {
    const std::vector<float> logits = LogitsWithTies(size, random);
    EXPECT_EQ(Argmax(logits, 0).id,
              std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
}

TEST(TopCandidates, AgreesWithASort) {
  std::mt19937 random(6);
  for (const int64_t size : {1, 5, 31, 33, 259, 3000}) {
    for (const int64_t count : {0, 1, 2, 7, 256, 5000}) {
      std::vector<float> logits = LogitsWithTies(size, random);
      if (size > 5) logits[random() % size] = -kInfinity;
      std::vector<Candidate> expected = Sorted(logits);
      if (static_cast<int64_t>(expected.size()) > count) expected.resize(count);
      const std::vector<Candidate> top = TopCandidates(logits, 100, count);
      ASSERT_EQ(top.size(), expected.size()) << size << ", " << count;
      for (size_t i = 0; i < top.size(); ++i) {
        EXPECT_EQ(top[i].id, expected[i].id + 100);
        EXPECT_EQ(top[i].logit, expected[i].logit);
      }
    }
  }
}

TEST(GumbelArgmax, SlicesAndCandidatesFindTheTokenOfTheWholeRow) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 100; ++trial) {
    const int64_t size = 1 + random() % 1500;
    std::vector<float> logits(size);
    for (float& x : logits) x = std::normal_distribution<float>(0.0f, 3.0f)(random);
    const NoiseKey key = {.seed = random(), .position = static_cast<int64_t>(random())};
    const double inverse_temperature = 0.1 + (random() % 100) * 0.05;
    const ScoredToken whole = GumbelArgmax(logits, 0, inverse_temperature, key);

    ScoredToken best;
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t id = 0; id < size; ++id) {
      const double score = logits[id] * inverse_temperature + GumbelNoise(key, id);
      if (score > highest) best = {static_cast<int32_t>(id), highest = score};
    }
    EXPECT_EQ(whole.id, best.id);
    EXPECT_EQ(whole.score, best.score);

    const int64_t cut = random() % (size + 1);  // most cut a group that shares random bits
    const std::span<const float> all = logits;
    ScoredToken merged = GumbelArgmax(all.first(cut), 0, inverse_temperature, key);
    const ScoredToken second =
        GumbelArgmax(all.subspan(cut), static_cast<int32_t>(cut), inverse_temperature, key);
    if (merged.YieldsTo(second)) merged = second;
    EXPECT_EQ(merged.id, whole.id);
    EXPECT_EQ(merged.score, whole.score);

    EXPECT_EQ(GumbelArgmax(Sorted(logits), inverse_temperature, key).id, whole.id);
  }
}

TEST(GumbelArgmax, MaskedTokensNeverWin) {
  std::vector<float> logits(50, -kInfinity);
  EXPECT_EQ(GumbelArgmax(logits, 0, 1.0, {1, 1}).id, -1);
  logits[33] = -1e30f;
  for (int64_t position = 0; position < 100; ++position) {
    EXPECT_EQ(GumbelArgmax(logits, 0, 1.0, {.seed = 9, .position = position}).id, 33);
  }
}

TEST(GumbelArgmax, ColdRowsTakeTheArgmax) {
  std::mt19937 random(8);
  std::vector<float> logits(100);
  for (float& x : logits) x = std::normal_distribution<float>(0.0f, 1.0f)(random);
  for (const double temperature : {1e-4, 1e-5}) {
    for (int64_t position = 0; position < 50; ++position) {
      EXPECT_EQ(GumbelArgmax(logits, 0, 1.0 / temperature, {.seed = 1, .position = position}).id,
                Argmax(logits, 0).id);
    }
  }
}

// Pearson's chi-square of draws over positions, and over seeds, against the softmax.
TEST(GumbelArgmax, DrawsFollowTheSoftmax) {
  const std::vector<float> logits = {1.0f, 0.0f, -1.0f, 2.0f, 0.5f, -3.0f, 1.5f, 0.0f};
  constexpr int kDraws = 40000;
  for (const double temperature : {0.7, 1.0, 1.8}) {
    std::vector<double> expected;
    double total = 0.0;
    for (const float x : logits) total += expected.emplace_back(std::exp(x / temperature));
    for (const bool vary_seed : {false, true}) {
      std::vector<int> counts(logits.size());
      for (int i = 0; i < kDraws; ++i) {
        const NoiseKey key = {.seed = vary_seed ? uint64_t(i) : 42, .position = vary_seed ? 3 : i};
        ++counts[GumbelArgmax(logits, 0, 1.0 / temperature, key).id];
      }
      double chi_square = 0.0;
      for (size_t i = 0; i < logits.size(); ++i) {
        const double mean = kDraws * expected[i] / total;
        chi_square += (counts[i] - mean) * (counts[i] - mean) / mean;
      }
      EXPECT_LT(chi_square, 24.3) << temperature;  // 7 degrees of freedom, p = 0.001
    }
  }
}

// Noise of neighbouring ids, positions and seeds must not move together.
TEST(GumbelNoise, NeighboursAreUncorrelated) {
  constexpr int kCount = 20000;
  const auto correlation = [](auto first, auto second) {
    constexpr double kMean = 0.5772156649;  // Euler's constant
    constexpr double kVariance = 1.6449340668;
    double sum = 0.0;
    for (int i = 0; i < kCount; ++i) sum += (first(i) - kMean) * (second(i) - kMean);
    return sum / kCount / kVariance;
  };
  const auto at = [](uint64_t seed, int64_t position, int32_t id) {
    return GumbelNoise({.seed = seed, .position = position}, id);
  };
  const auto by_id = [&](int i) { return at(7, 5, i); };
  EXPECT_NEAR(correlation(by_id, by_id), 1.0, 0.1);
  EXPECT_NEAR(correlation(by_id, [&](int i) { return at(7, 5, i + 1); }), 0.0, 0.03);
  EXPECT_NEAR(correlation(by_id, [&](int i) { return at(7, 6, i); }), 0.0, 0.03);
  EXPECT_NEAR(correlation(by_id, [&](int i) { return at(8, 5, i); }), 0.0, 0.03);
}

RankedRow Ranked(const std::vector<float>& logits, double temperature) {
  RankedRow row = {.head = Sorted(logits), .complete = true, .total = 0.0};
  row.total = TotalOf(SumBlocks(logits, 1.0 / temperature), row.head[0].logit, 1.0 / temperature);
  return row;
}

// The filters as their definitions say, in long double.
int64_t NaiveKept(const std::vector<Candidate>& sorted, const SamplingParams& params) {
  std::vector<long double> p;
  for (const Candidate& c : sorted) {
    p.push_back(
        std::exp((c.logit - sorted[0].logit) / static_cast<long double>(params.temperature)));
  }
  size_t kept = p.size();
  while (p[kept - 1] < params.min_p) --kept;
  if (params.top_k > 0) kept = std::min<size_t>(kept, params.top_k);
  long double total = 0.0L;
  for (size_t i = 0; i < kept; ++i) total += p[i];
  long double sum = 0.0L;
  for (size_t i = 0; i < kept; ++i) {
    sum += p[i];
    if (params.top_p < 1.0 && sum >= params.top_p * total) return i + 1;
  }
  return kept;
}

TEST(CountKept, AgreesWithTheDefinitions) {
  std::mt19937 random(10);
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<float> logits(1 + random() % 60);
    for (float& x : logits) x = std::normal_distribution<float>(0.0f, 2.0f)(random);
    const double choices[] = {0.05, 0.3, 0.77, 0.9, 0.99};
    SamplingParams params;
    params.temperature = 0.3 + 0.01 * (random() % 200);
    if (random() % 2) params.top_p = choices[random() % 5];
    if (random() % 2) params.min_p = choices[random() % 5] * 0.3;
    if (random() % 2) params.top_k = 1 + random() % 70;
    const RankedRow row = Ranked(logits, params.temperature);
    EXPECT_EQ(CountKept(row, params), NaiveKept(row.head, params));
  }
}

// A shortened head either gives the count of the whole row or says that it cannot know.
TEST(CountKept, AHeadThatIsTooShortSaysSo) {
  std::mt19937 random(11);
  int undecided = 0, decided = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<float> logits(20 + random() % 60);
    for (float& x : logits) x = std::normal_distribution<float>(0.0f, 2.0f)(random);
    SamplingParams params;
    if (random() % 2) params.top_p = 0.3 + 0.01 * (random() % 70);
    if (random() % 3 == 0) params.min_p = 0.001 * (1 + random() % 500);
    if (random() % 3 == 0) params.top_k = 2 + random() % 30;
    RankedRow row = Ranked(logits, params.temperature);
    const int64_t whole = *CountKept(row, params);
    row.head.resize(1 + random() % 19);
    row.complete = false;
    const std::optional<int64_t> kept = CountKept(row, params);
    if (kept.has_value()) {
      EXPECT_EQ(*kept, whole);
      ++decided;
    } else {
      ++undecided;
    }
  }
  EXPECT_GT(decided, 300);
  EXPECT_GT(undecided, 300);
}

TEST(CountKept, AtLeastOneTokenIsKept) {
  const RankedRow row = Ranked({0.0f, 0.0f, 0.0f, 0.0f}, 1.0);
  EXPECT_EQ(CountKept(row, {.top_p = 1e-8}), 1);
  EXPECT_EQ(CountKept(row, {.min_p = 1.0}), 4);
  EXPECT_EQ(CountKept(row, {.top_k = 3, .top_p = 0.5}), 2);  // renormalised: 1/3, 2/3
  EXPECT_EQ(CountKept(row, {.top_p = 0.5}), 2);
  EXPECT_EQ(CountKept(row, {.top_p = 0.51}), 3);
}

}  // namespace
}  // namespace heddle
