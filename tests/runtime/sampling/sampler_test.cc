#include "runtime/sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/sampling/row_choice.h"
#include "tests/runtime/sampling/vocabulary_world.h"

namespace heddle {
namespace {

using testing::HasSubstr;

struct Job {
  LogitRows rows;
  std::vector<SequenceState> sequences;  // [rows]
  int64_t num_sampled_ids = 0;
  std::vector<int32_t> eos_token_ids = {};

  void Add(std::vector<float> logits, SequenceState sequence) {
    rows.push_back(std::move(logits));
    sequences.push_back(std::move(sequence));
  }
};

bool SameBits(const SampledToken& a, const SampledToken& b) {
  return a.status == b.status && a.token_id == b.token_id && a.logprob == b.logprob &&
         std::equal(a.top_logprobs.begin(), a.top_logprobs.end(), b.top_logprobs.begin(),
                    b.top_logprobs.end(), [](const TokenLogprob& x, const TokenLogprob& y) {
                      return x.token_id == y.token_id && x.logprob == y.logprob;
                    });
}

// What every rank got, which must be the same.
std::vector<SampledToken> Sample(const Job& job, int64_t vocab_size, int num_ranks,
                                 const CpuBackendOptions& backend = {}) {
  std::mutex mutex;
  std::vector<std::vector<SampledToken>> all;
  OnRanks(job.rows, vocab_size, num_ranks, backend, [&](RankOfVocabulary& rank) -> absl::Status {
    auto sampler = Sampler::Create({.vocab_size = vocab_size,
                                    .vocab_shards = rank.shards,
                                    .num_sampled_ids = job.num_sampled_ids,
                                    .eos_token_ids = job.eos_token_ids},
                                   rank.backend, *rank.world.communicator);
    if (!sampler.ok()) return sampler.status();
    std::vector<const SequenceState*> sequences;
    for (const SequenceState& sequence : job.sequences) sequences.push_back(&sequence);
    auto tokens = (*sampler)->Sample(rank.logits, sequences, rank.stream);
    if (!tokens.ok()) return tokens.status();
    const std::lock_guard lock(mutex);
    all.push_back(*std::move(tokens));
    return absl::OkStatus();
  });
  EXPECT_EQ(static_cast<int>(all.size()), num_ranks);
  if (all.empty()) return std::vector<SampledToken>(job.rows.size());
  for (const std::vector<SampledToken>& tokens : all) {
    for (size_t row = 0; row < tokens.size(); ++row) {
      EXPECT_TRUE(SameBits(tokens[row], all[0][row])) << row;
    }
  }
  return all[0];
}

std::vector<float> RandomLogits(int64_t size, std::mt19937& random, float deviation = 3.0f) {
  std::vector<float> logits(size);
  for (float& x : logits) x = std::normal_distribution<float>(0.0f, deviation)(random);
  return logits;
}

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab_size, std::mt19937& random) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = random() % vocab_size;
  return tokens;
}

// One of every kind that a row can be.
std::vector<SamplingParams> EveryKind(int64_t vocab_size) {
  return {
      {.temperature = 0.0},
      {.temperature = 0.0, .logprobs = 0},
      {.temperature = 0.7},
      {.temperature = 1.3, .logprobs = 3},
      {.top_k = 1},
      {.top_k = 5},
      {.top_k = 300, .logprobs = 2},
      {.top_p = 0.0},
      {.top_p = 0.3},
      {.top_p = 0.9, .logprobs = 5},
      {.top_p = 0.999},
      {.min_p = 0.05},
      {.min_p = 1e-6},
      {.temperature = 2.5, .top_k = 40, .top_p = 0.8, .min_p = 0.01, .logprobs = 1},
      {.temperature = 0.8,
       .repetition_penalty = 1.2,
       .presence_penalty = 0.3,
       .frequency_penalty = 0.1},
      {.temperature = 0.0, .repetition_penalty = 1.5, .logprobs = 4},
      {.top_p = 0.95, .frequency_penalty = 0.7},
      {.max_tokens = 10, .min_tokens = 9, .stop_token_ids = {0}},
      {.logprobs = vocab_size},
      {.top_k = 1000000, .top_p = 0.97},
  };
}

Job JobOfEveryKind(int64_t vocab_size, std::mt19937& random, float deviation = 3.0f) {
  Job job;
  for (const SamplingParams& params : EveryKind(vocab_size)) {
    job.Add(RandomLogits(vocab_size, random, deviation),
            SequenceState(params, random(), RandomTokens(12, vocab_size, random), 6));
  }
  return job;
}

TEST(Sampler, EveryRankCountGivesTheSameBits) {
  std::mt19937 random(1);
  // Deviations from peaked to flat: the flat rows keep more than 256 candidates a rank.
  for (const auto& [vocab_size, deviation] : {std::pair<int64_t, float>{5, 3.0f},
                                              {31, 3.0f},
                                              {33, 1.0f},
                                              {259, 3.0f},
                                              {2500, 1.0f},
                                              {5000, 0.1f},
                                              {9217, 2.0f}}) {
    const Job job = JobOfEveryKind(vocab_size, random, deviation);
    const std::vector<SampledToken> one = Sample(job, vocab_size, 1);
    for (const int num_ranks : {2, 3, 5, 8}) {
      const std::vector<SampledToken> many = Sample(job, vocab_size, num_ranks);
      for (size_t row = 0; row < one.size(); ++row) {
        EXPECT_TRUE(one[row].status.ok()) << one[row].status;
        EXPECT_TRUE(SameBits(one[row], many[row]))
            << "row " << row << ", vocabulary " << vocab_size << ", ranks " << num_ranks << ": "
            << one[row].token_id << " and " << many[row].token_id;
      }
    }
  }
}

TEST(Sampler, AMixedBatchEqualsSoloRuns) {
  std::mt19937 random(2);
  constexpr int64_t kVocabSize = 2500;
  const Job mixed = JobOfEveryKind(kVocabSize, random);
  std::vector<SampledToken> alone;
  for (size_t row = 0; row < mixed.rows.size(); ++row) {
    Job solo;
    solo.Add(mixed.rows[row], mixed.sequences[row]);
    alone.push_back(Sample(solo, kVocabSize, 2)[0]);
  }
  for (const CpuBackendOptions& backend :
       {CpuBackendOptions{}, CpuBackendOptions{.num_threads = 3},
        CpuBackendOptions{.stream_mode = CpuStreamMode::kDeferred}}) {
    const std::vector<SampledToken> together = Sample(mixed, kVocabSize, 2, backend);
    for (size_t row = 0; row < alone.size(); ++row) {
      EXPECT_TRUE(SameBits(alone[row], together[row])) << row;
    }
  }
}

// Penalties, temperature, min-p, top-k, top-p and noise as their definitions say, in long double.
int32_t NaiveToken(std::vector<float> logits, const SequenceState& sequence) {
  sequence.AdjustLogits(logits, {0, static_cast<int64_t>(logits.size())}, {});
  const SamplingParams& params = sequence.params();
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (params.IsGreedy()) return order[0];
  std::vector<long double> weights;
  for (const int32_t id : order) {
    weights.push_back(
        std::exp((static_cast<long double>(logits[id]) - logits[order[0]]) / params.temperature));
  }
  size_t kept = weights.size();
  while (weights[kept - 1] < params.min_p || weights[kept - 1] == 0.0L) --kept;
  if (params.top_k > 0) kept = std::min<size_t>(kept, params.top_k);
  const long double total = std::accumulate(weights.begin(), weights.begin() + kept, 0.0L);
  long double sum = 0.0L;
  for (size_t i = 0; i < kept && params.top_p < 1.0; ++i) {
    sum += weights[i];
    if (sum >= params.top_p * total) kept = i + 1;
  }
  int32_t best = -1;
  long double best_score = -std::numeric_limits<long double>::infinity();
  for (size_t i = 0; i < kept; ++i) {
    const NoiseKey key = {.seed = sequence.seed(), .position = sequence.position()};
    const long double score = logits[order[i]] / static_cast<long double>(params.temperature) +
                              GumbelNoise(key, order[i]);
    if (score > best_score) best = order[i], best_score = score;
  }
  return best;
}

TEST(Sampler, AgreesWithTheDefinitions) {
  std::mt19937 random(3);
  for (const int64_t vocab_size : {1, 5, 31, 259, 1500}) {
    for (int trial = 0; trial < 10; ++trial) {
      Job job = JobOfEveryKind(vocab_size, random);
      job.sequences.erase(job.sequences.begin() + 17);  // min_tokens has a test of its own
      job.rows.erase(job.rows.begin() + 17);
      const std::vector<SampledToken> tokens = Sample(job, vocab_size, 1 + trial % 3);
      for (size_t row = 0; row < tokens.size(); ++row) {
        EXPECT_EQ(tokens[row].token_id, NaiveToken(job.rows[row], job.sequences[row]))
            << "row " << row << ", vocabulary " << vocab_size;
      }
    }
  }
}

TEST(Sampler, LogprobsAreThoseOfTheRawDistribution) {
  std::mt19937 random(4);
  for (const int64_t vocab_size : {5, 259, 3000}) {
    Job job;
    // Filters, penalties and temperature change the choice and not the report.
    for (const double temperature : {0.0, 0.5, 1.0}) {
      job.Add(
          RandomLogits(vocab_size, random),
          SequenceState(
              {.temperature = temperature, .top_k = 3, .repetition_penalty = 2.0, .logprobs = 4}, 9,
              RandomTokens(20, vocab_size, random), 10));
    }
    const std::vector<SampledToken> tokens = Sample(job, vocab_size, 3);
    for (size_t row = 0; row < tokens.size(); ++row) {
      const std::vector<float>& logits = job.rows[row];
      long double total = 0.0L;
      for (const float x : logits) total += std::exp(static_cast<long double>(x));
      const auto logprob = [&](int32_t id) {
        return static_cast<double>(logits[id] - std::log(total));
      };
      EXPECT_NEAR(tokens[row].logprob, logprob(tokens[row].token_id), 1e-6);
      std::vector<int32_t> order(vocab_size);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
      ASSERT_EQ(tokens[row].top_logprobs.size(), 4u);
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(tokens[row].top_logprobs[i].token_id, order[i]);
        EXPECT_NEAR(tokens[row].top_logprobs[i].logprob, logprob(order[i]), 1e-6);
      }
    }
  }
}

TEST(Sampler, LogprobsAreFinite) {
  Job job;
  const std::vector<float> logits = {0.0f, -1e6f, -3e38f, -1e4f, -5.0f};
  for (const SamplingParams& params : {SamplingParams{.top_k = 1, .logprobs = 5},
                                       SamplingParams{.temperature = 0.01, .logprobs = 5}}) {
    job.Add(logits, SequenceState(params, 1, {}, 0));
  }
  for (const SampledToken& token : Sample(job, 5, 2)) {
    EXPECT_EQ(token.token_id, 0);
    EXPECT_NEAR(token.logprob, -0.00671534, 1e-6);
    ASSERT_EQ(token.top_logprobs.size(), 5u);
    EXPECT_NEAR(token.top_logprobs[1].logprob, -5.00671534, 1e-5);
    for (int i = 2; i < 5; ++i) EXPECT_EQ(token.top_logprobs[i].logprob, kLogprobFloor);
  }
}

TEST(Sampler, TiesGoToTheLowestIdOfAllRanks) {
  std::vector<float> logits(259, 0.0f);
  for (const int id : {258, 200, 130, 100}) logits[id] = 4.0f;
  Job job;
  job.Add(logits, SequenceState({.temperature = 0.0, .logprobs = 4}, 0, {}, 0));
  for (const int num_ranks : {1, 2, 4, 8}) {
    const SampledToken token = Sample(job, 259, num_ranks)[0];
    EXPECT_EQ(token.token_id, 100);
    std::vector<int32_t> top;
    for (const TokenLogprob& t : token.top_logprobs) top.push_back(t.token_id);
    EXPECT_THAT(top, testing::ElementsAre(100, 130, 200, 258));
  }
}

TEST(Sampler, ARowWithBadLogitsFailsAlone) {
  std::mt19937 random(5);
  constexpr int64_t kVocabSize = 259;
  const Job good = JobOfEveryKind(kVocabSize, random);
  const std::vector<SampledToken> expected = Sample(good, kVocabSize, 2);
  const float infinity = std::numeric_limits<float>::infinity();
  const std::set<size_t> bad_rows = {0, 3, 9, good.rows.size() - 2};
  for (const float bad : {std::nanf(""), infinity, -infinity}) {
    for (const int64_t at : {0, 130, 258}) {
      Job job = good;
      for (const size_t row : bad_rows) job.rows[row][at] = bad;
      const std::vector<SampledToken> tokens = Sample(job, kVocabSize, 2);
      for (size_t row = 0; row < tokens.size(); ++row) {
        if (bad_rows.count(row) == 0) {
          EXPECT_TRUE(SameBits(tokens[row], expected[row])) << row;
          continue;
        }
        EXPECT_EQ(tokens[row].status.code(), absl::StatusCode::kInternal);
        EXPECT_EQ(tokens[row].token_id, -1);
        EXPECT_THAT(std::string(tokens[row].status.message()),
                    HasSubstr("for token id " + std::to_string(at) + " at position 12"));
      }
    }
  }
}

TEST(Sampler, EosAndStopsWaitForMinTokens) {
  std::vector<float> logits(40, 0.0f);
  logits[7] = 50.0f;   // EOS
  logits[30] = 40.0f;  // a stop token
  logits[12] = 30.0f;
  for (const int num_ranks : {1, 3}) {
    Job job;
    job.eos_token_ids = {7};
    const SamplingParams params = {.min_tokens = 2, .temperature = 0.0, .stop_token_ids = {30}};
    job.Add(logits, SequenceState(params, 0, {1, 2}, 2));
    job.Add(logits, SequenceState(params, 0, {1, 2, 12}, 2));
    job.Add(logits, SequenceState(params, 0, {1, 2, 12, 12}, 2));
    SamplingParams ignoring = params;
    ignoring.ignore_eos = true;
    job.Add(logits, SequenceState(ignoring, 0, {1, 2}, 2));
    std::vector<int32_t> ids;
    for (const SampledToken& token : Sample(job, 40, num_ranks)) ids.push_back(token.token_id);
    EXPECT_THAT(ids, testing::ElementsAre(12, 12, 7, 7));
  }
}

TEST(Sampler, ARowWhoseTokensAreAllMaskedFails) {
  for (const SamplingParams& params :
       {SamplingParams{.min_tokens = 3, .temperature = 0.0}, SamplingParams{.min_tokens = 3},
        SamplingParams{.min_tokens = 3, .top_p = 0.5}}) {
    Job job;
    job.eos_token_ids = {0};
    job.Add({1.0f}, SequenceState(params, 0, {0}, 1));
    const SampledToken token = Sample(job, 1, 2)[0];
    EXPECT_EQ(token.token_id, -1);
    EXPECT_THAT(std::string(token.status.message()),
                HasSubstr("no token may be sampled at position 1: min_tokens, 3"));
  }
}

TEST(Sampler, PaddingIdsAreNeverSampled) {
  std::vector<float> logits(272, 0.0f);
  std::fill(logits.begin() + 259, logits.end(), 20.0f);
  Job job;
  job.num_sampled_ids = 259;
  for (const SamplingParams& params : EveryKind(272)) {
    for (int position = 0; position < 8; ++position) {
      job.Add(logits, SequenceState(params, 3, std::vector<int32_t>(position, 1), 0));
    }
  }
  for (const int num_ranks : {1, 2, 8}) {
    for (const SampledToken& token : Sample(job, 272, num_ranks)) {
      EXPECT_TRUE(token.status.ok());
      EXPECT_LT(token.token_id, 259);
      EXPECT_GE(token.token_id, 0);
    }
  }
}

TEST(Sampler, AVocabularyOfOne) {
  Job job;
  for (const SamplingParams& params : EveryKind(1)) {
    if (params.min_tokens == 0) job.Add({-2.5f}, SequenceState(params, 1, {0}, 1));
  }
  for (const SampledToken& token : Sample(job, 1, 3)) {
    EXPECT_EQ(token.token_id, 0);
    EXPECT_EQ(token.logprob, 0.0f);
  }
}

TEST(Sampler, ColdRowsAreGreedy) {
  std::mt19937 random(6);
  const std::vector<float> logits = RandomLogits(259, random);
  const int32_t best =
      static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  Job job;
  for (const double temperature : {0.0, 1e-8, 1e-5, 1e-4}) {
    job.Add(logits, SequenceState({.temperature = temperature}, 7, {}, 0));
    job.Add(logits, SequenceState({.temperature = temperature, .top_p = 0.9}, 7, {}, 0));
  }
  for (const SampledToken& token : Sample(job, 259, 2)) EXPECT_EQ(token.token_id, best);
}

TEST(Sampler, TheSeedAloneMakesTheStream) {
  std::mt19937 random(7);
  Job job;
  const std::vector<float> logits = RandomLogits(259, random, 0.5f);
  for (int position = 0; position < 40; ++position) {
    for (const uint64_t seed : {42, 42, 43}) {
      job.Add(logits, SequenceState({}, seed, std::vector<int32_t>(position, 5), 0));
    }
  }
  const std::vector<SampledToken> tokens = Sample(job, 259, 2);
  int different_seed = 0, different_position = 0;
  for (size_t i = 0; i < tokens.size(); i += 3) {
    EXPECT_EQ(tokens[i].token_id, tokens[i + 1].token_id);
    different_seed += tokens[i].token_id != tokens[i + 2].token_id ? 1 : 0;
    if (i >= 3) different_position += tokens[i].token_id != tokens[i - 3].token_id ? 1 : 0;
  }
  EXPECT_GT(different_seed, 30);
  EXPECT_GT(different_position, 30);
}

// Pearson's chi-square of filtered draws against the renormalised rest.
TEST(Sampler, FilteredDrawsFollowTheRenormalisedRest) {
  const std::vector<float> logits = {2.0f, 1.5f, 1.0f, 0.5f, 0.0f, -0.5f, -1.0f, -6.0f};
  constexpr int kDraws = 4000;
  struct Case {
    SamplingParams params;
    int kept;
  };
  for (const auto& [params, kept] :
       {Case{{.top_k = 4}, 4}, Case{{.top_p = 0.85}, 4}, Case{{.min_p = 0.1}, 5},
        Case{{.top_k = 6, .top_p = 0.95}, 5}}) {
    Job job;
    for (int draw = 0; draw < kDraws; ++draw) job.Add(logits, SequenceState(params, draw, {}, 0));
    std::vector<int> counts(logits.size());
    for (const SampledToken& token : Sample(job, 8, 2)) ++counts[token.token_id];
    double total = 0.0;
    for (int id = 0; id < kept; ++id) total += std::exp(logits[id]);
    double chi_square = 0.0;
    for (int id = 0; id < 8; ++id) {
      const double mean = id < kept ? kDraws * std::exp(logits[id]) / total : 0.0;
      if (id < kept) {
        chi_square += (counts[id] - mean) * (counts[id] - mean) / mean;
      } else {
        EXPECT_EQ(counts[id], 0) << id;
      }
    }
    EXPECT_LT(chi_square, 18.5);  // 4 degrees of freedom, p = 0.001
  }
}

TEST(Sampler, AStepWithoutRowsIsLegal) { EXPECT_TRUE(Sample(Job(), 259, 2).empty()); }

}  // namespace
}  // namespace heddle
