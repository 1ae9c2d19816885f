#include "runtime/sampling/prompt_scorer.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/sampling/token_logprob.h"
#include "tests/runtime/sampling/vocabulary_world.h"

namespace heddle {
namespace {

ScoredRows Score(const LogitRows& rows, const std::vector<int32_t>& targets, bool want_logits,
                 int num_ranks, const CpuBackendOptions& backend = {}) {
  ScoredRows on_root;
  OnRanks(rows, rows[0].size(), num_ranks, backend, [&](RankOfVocabulary& rank) -> absl::Status {
    auto scorer = PromptScorer::Create(rank.shards, rank.backend, *rank.world.communicator);
    if (!scorer.ok()) return scorer.status();
    auto scored = (*scorer)->Score(rank.logits, targets, want_logits, rank.stream);
    if (!scored.ok()) return scored.status();
    if (rank.world.self.rank == 0) {
      on_root = *std::move(scored);
    } else {
      EXPECT_TRUE(scored->logprobs.empty());
      EXPECT_TRUE(scored->logits.empty());
    }
    return absl::OkStatus();
  });
  return on_root;
}

// More rows than are gathered at once.
LogitRows RandomRows(int64_t vocab_size) {
  std::mt19937 random(1);
  LogitRows rows(2 * LogitExchange::kMaxWholeRows + 3, std::vector<float>(vocab_size));
  for (std::vector<float>& row : rows) {
    for (float& x : row) x = std::normal_distribution<float>(0.0f, 4.0f)(random);
  }
  return rows;
}

TEST(PromptScorer, GivesLogprobsAndLogitsAtAnyRankCount) {
  for (const int64_t vocab_size : {1, 5, 259, 3000}) {
    const LogitRows rows = RandomRows(vocab_size);
    std::vector<int32_t> targets;
    for (size_t i = 0; i < rows.size(); ++i) targets.push_back(i * 7 % vocab_size);
    targets[2] = -1;
    const ScoredRows one = Score(rows, targets, true, 1);
    ASSERT_EQ(one.logprobs.size(), rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      long double total = 0.0L;
      for (const float x : rows[i]) total += std::exp(static_cast<long double>(x));
      const double expected =
          targets[i] < 0 ? 0.0 : static_cast<double>(rows[i][targets[i]] - std::log(total));
      EXPECT_NEAR(one.logprobs[i], expected, 2e-6);
    }
    std::vector<float> flat;
    for (const std::vector<float>& row : rows) flat.insert(flat.end(), row.begin(), row.end());
    EXPECT_EQ(one.logits, flat);
    for (const int num_ranks : {2, 3, 8}) {
      const ScoredRows many = Score(rows, targets, true, num_ranks, {.num_threads = 2});
      EXPECT_EQ(many.logprobs, one.logprobs);
      EXPECT_EQ(many.logits, flat);
    }
  }
}

TEST(PromptScorer, LogitsAreKeptOnlyIfWanted) {
  EXPECT_TRUE(Score(RandomRows(5), std::vector<int32_t>(35, 1), false, 2).logits.empty());
}

TEST(PromptScorer, WaitsForADeferredStream) {
  const LogitRows rows = RandomRows(259);
  const std::vector<int32_t> targets(rows.size(), 100);
  EXPECT_EQ(Score(rows, targets, false, 2, {.stream_mode = CpuStreamMode::kDeferred}).logprobs,
            Score(rows, targets, false, 2).logprobs);
}

TEST(PromptScorer, BadRowsAreNaNAndUnlikelyTokensFinite) {
  LogitRows rows(3, {0.0f, 0.0f, -1e30f});
  rows[1][0] = std::numeric_limits<float>::infinity();
  const ScoredRows scored = Score(rows, {0, 1, 2}, false, 2);
  EXPECT_NEAR(scored.logprobs[0], -std::log(2.0), 1e-7);
  EXPECT_TRUE(std::isnan(scored.logprobs[1]));
  EXPECT_EQ(scored.logprobs[2], kLogprobFloor);
}

}  // namespace
}  // namespace heddle
