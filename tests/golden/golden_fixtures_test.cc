// The fixtures themselves: complete, consistent, and sharp enough to tell a wrong engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "tests/support/golden.h"

namespace heddle {
namespace {

using ::testing::IsSupersetOf;
using ::testing::SizeIs;

void ExpectConsistent(const GoldenModel& model) {
  EXPECT_TRUE(std::filesystem::exists(model.path));
  EXPECT_FALSE(model.rope_inv_freq.empty());
  ASSERT_FALSE(model.prompts.empty());
  for (const GoldenPrompt& prompt : model.prompts) {
    SCOPED_TRACE(model.path + " " + prompt.id);
    ASSERT_THAT(prompt.logits, SizeIs(prompt.token_ids.size() * model.vocab_size));
    EXPECT_TRUE(std::all_of(prompt.logits.begin(), prompt.logits.end(),
                            [](float logit) { return std::isfinite(logit); }));
    // The first greedy token, and its gap, are those of the last row.
    ASSERT_FALSE(prompt.greedy.empty());
    std::vector<float> row(prompt.logits.end() - model.vocab_size, prompt.logits.end());
    const auto best = std::max_element(row.begin(), row.end());
    EXPECT_EQ(prompt.greedy[0].token_id, best - row.begin());
    const float best_logit = *best;
    *best = -std::numeric_limits<float>::infinity();
    const float second_logit = *std::max_element(row.begin(), row.end());
    EXPECT_NEAR(prompt.greedy[0].top2_gap, best_logit - second_logit, 2e-5);
    EXPECT_LE(prompt.token_ids.size() + prompt.greedy.size(),
              static_cast<size_t>(model.max_model_len));
  }
}

TEST(GoldenFixturesTest, ModelsAreConsistent) {
  EXPECT_THAT(GoldenModelNames(),
              IsSupersetOf({"gqa-a", "gqa-odd", "hd", "llama-biases", "mha", "mistral-window",
                            "mqa", "mqa-two-shards", "qw2", "qw2-window", "qwen3", "rope-dynamic",
                            "rope-linear", "rope-llama3", "rope-yarn", "tied"}));
  for (const std::string& name : GoldenModelNames()) {
    const auto model = LoadGoldenModel(name);
    ASSERT_TRUE(model.ok()) << model.status();
    ExpectConsistent(*model);
  }
}

TEST(GoldenFixturesTest, TwoShardsAreTheSameModel) {
  const auto one = LoadGoldenModel("mqa");
  const auto two = LoadGoldenModel("mqa-two-shards");
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->logits, two->logits);
}

TEST(GoldenFixturesTest, AnUnknownModelIsNamed) {
  const auto model = LoadGoldenModel("no-such-model");
  ASSERT_FALSE(model.ok());
  EXPECT_THAT(std::string(model.status().message()), ::testing::HasSubstr("no-such-model"));
}

TEST(LogitsDifferenceTest, IsAShareOfTheRange) {
  const std::vector<float> expected = {-1, 0, 3};
  EXPECT_EQ(LogitsDifference(expected, expected), 0);
  EXPECT_EQ(LogitsDifference(expected, std::vector<float>{-1, 0.5, 3}), 0.125);
}

TEST(LogitsDifferenceTest, IsInfiniteForWhatCannotBeCompared) {
  const std::vector<float> expected = {-1, 0, 3};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& actual :
       {std::vector<float>{}, std::vector<float>{-1, 0}, std::vector<float>{-1, nan, 3}}) {
    EXPECT_TRUE(std::isinf(LogitsDifference(expected, actual)));
  }
}

}  // namespace
}  // namespace heddle
