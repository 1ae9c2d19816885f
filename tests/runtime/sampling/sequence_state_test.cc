#include "runtime/sampling/sequence_state.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using testing::ElementsAre;

constexpr float kMasked = -std::numeric_limits<float>::infinity();

std::vector<float> Adjusted(const SequenceState& sequence, std::vector<float> logits,
                            std::vector<int32_t> eos = {}) {
  sequence.AdjustLogits(logits, {0, static_cast<int64_t>(logits.size())}, eos);
  return logits;
}

TEST(SequenceState, PositionsCountPromptAndOutput) {
  SequenceState sequence({}, 7, {5, 6, 5}, 2);
  EXPECT_EQ(sequence.position(), 3);
  EXPECT_EQ(sequence.num_output_tokens(), 1);
  sequence.Append(9);
  EXPECT_EQ(sequence.position(), 4);
  EXPECT_EQ(sequence.num_output_tokens(), 2);
  EXPECT_THAT(sequence.token_ids(), ElementsAre(5, 6, 5, 9));
  EXPECT_FALSE(sequence.AdjustsLogits());
}

TEST(SequenceState, RepetitionReachesThePromptTheOthersOnlyTheOutput) {
  // 0 and 1 in the prompt, 1 and 2 (twice) in the output, 3 in neither.
  const std::vector<int32_t> tokens = {0, 1, 1, 2, 2};
  const std::vector<float> logits = {2.0f, 2.0f, -2.0f, 2.0f};
  EXPECT_THAT(Adjusted({{.repetition_penalty = 2.0}, 0, tokens, 2}, logits),
              ElementsAre(1.0f, 1.0f, -4.0f, 2.0f));
  EXPECT_THAT(Adjusted({{.presence_penalty = 0.5}, 0, tokens, 2}, logits),
              ElementsAre(2.0f, 1.5f, -2.5f, 2.0f));
  EXPECT_THAT(Adjusted({{.frequency_penalty = 0.5}, 0, tokens, 2}, logits),
              ElementsAre(2.0f, 1.5f, -3.0f, 2.0f));
  EXPECT_THAT(
      Adjusted({{.repetition_penalty = 2.0, .presence_penalty = 1.0, .frequency_penalty = 0.25},
                0,
                tokens,
                2},
               logits),
      ElementsAre(1.0f, -0.25f, -5.5f, 2.0f));
}

TEST(SequenceState, RebuiltFromItsTokensItIsTheSame) {
  const SamplingParams params = {.repetition_penalty = 1.3, .frequency_penalty = 0.4};
  SequenceState grown(params, 1, {3, 4}, 2);
  for (const int32_t token : {4, 1, 1, 0}) grown.Append(token);
  const SequenceState rebuilt(params, 1, {3, 4, 4, 1, 1, 0}, 2);
  const std::vector<float> logits = {0.5f, -1.0f, 2.0f, 3.0f, -0.25f};
  EXPECT_EQ(Adjusted(grown, logits), Adjusted(rebuilt, logits));
}

TEST(SequenceState, SlicesAreAdjustedAsTheWhole) {
  const SequenceState sequence(
      {.min_tokens = 5, .repetition_penalty = 1.7, .stop_token_ids = {2, 8}}, 0, {1, 4, 7, 9, 4},
      2);
  std::vector<float> whole(10);
  std::iota(whole.begin(), whole.end(), -4.0f);
  const std::vector<float> raw = whole;
  const std::vector<int32_t> eos = {0};
  sequence.AdjustLogits(whole, {0, 10}, eos);
  for (int64_t cut = 0; cut <= 10; ++cut) {
    std::vector<float> low(raw.begin(), raw.begin() + cut);
    std::vector<float> high(raw.begin() + cut, raw.end());
    sequence.AdjustLogits(low, {0, cut}, eos);
    sequence.AdjustLogits(high, {cut, 10}, eos);
    low.insert(low.end(), high.begin(), high.end());
    EXPECT_EQ(low, whole) << cut;
  }
}

TEST(SequenceState, NothingEndsItBeforeMinTokens) {
  const std::vector<float> logits = {1.0f, 2.0f, 3.0f, 4.0f};
  SequenceState sequence({.min_tokens = 2, .stop_token_ids = {1}}, 0, {0}, 1);
  EXPECT_TRUE(sequence.AdjustsLogits());
  EXPECT_THAT(Adjusted(sequence, logits, {3}), ElementsAre(1.0f, kMasked, 3.0f, kMasked));
  sequence.Append(2);
  EXPECT_THAT(Adjusted(sequence, logits, {3}), ElementsAre(1.0f, kMasked, 3.0f, kMasked));
  sequence.Append(2);
  EXPECT_FALSE(sequence.AdjustsLogits());
  EXPECT_THAT(Adjusted(sequence, logits, {3}), ElementsAre(1.0f, 2.0f, 3.0f, 4.0f));
}

TEST(SequenceState, AnIgnoredEosIsNotMasked) {
  SequenceState sequence({.min_tokens = 2, .ignore_eos = true, .stop_token_ids = {1}}, 0, {0}, 1);
  EXPECT_THAT(Adjusted(sequence, {1.0f, 2.0f, 3.0f}, {2}), ElementsAre(1.0f, kMasked, 3.0f));
}

TEST(SequenceState, PenaltiesKeepLogitsFinite) {
  const float max = std::numeric_limits<float>::max();
  const SequenceState sequence({.repetition_penalty = 1e-30, .presence_penalty = -2.0}, 0, {0, 1},
                               0);
  for (const float logit : Adjusted(sequence, {max, -max})) EXPECT_TRUE(std::isfinite(logit));
}

}  // namespace
}  // namespace heddle
