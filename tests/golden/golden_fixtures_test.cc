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

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::Field;
using ::testing::Ge;
using ::testing::IsSupersetOf;
using ::testing::Le;
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

TEST(GoldenFixturesTest, GgufFilesAreConsistent) {
  EXPECT_THAT(
      GoldenGgufNames(),
      IsSupersetOf({"llama-bf16", "llama-f16", "llama-k-rope-freqs", "llama-q4_0", "llama-q4_1",
                    "llama-q5_0", "llama-q5_1", "llama-q8_0", "qwen2-q4_1", "qwen2-q8_0"}));
  for (const std::string& name : GoldenGgufNames()) {
    const auto model = LoadGoldenGguf(name);
    ASSERT_TRUE(model.ok()) << model.status();
    ExpectConsistent(*model);
  }
}

TEST(GoldenFixturesTest, SmolLm2IsConsistent) {
  const auto golden = LoadGoldenSmolLm2();
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_TRUE(std::filesystem::exists(golden->perplexity.text_path));
  EXPECT_GT(golden->perplexity.num_tokens, golden->perplexity.window);
  EXPECT_GT(golden->perplexity.value, 1);
  EXPECT_THAT(golden->texts, SizeIs(Ge(20)));
  int num_clear = 0;
  int num_steps = 0;
  for (const GoldenText& text : golden->texts) {
    SCOPED_TRACE(text.id);
    EXPECT_FALSE(text.token_ids.empty());
    EXPECT_THAT(text.greedy, SizeIs(64));
    ASSERT_THAT(text.token_logprobs, SizeIs(text.token_ids.size() + text.greedy.size() - 1));
    EXPECT_THAT(text.token_logprobs, Each(Le(0)));
    for (const GoldenStep& step : text.greedy) {
      num_clear += step.top2_gap >= 1e-3 ? 1 : 0;
      ++num_steps;
    }
  }
  EXPECT_GE(num_clear, 0.95 * num_steps);
}

TEST(GoldenFixturesTest, SmolLm2PromptsAreAmongTheTokenizersStrings) {
  const auto golden = LoadGoldenSmolLm2();
  const auto strings = LoadGoldenSmolLm2Strings();
  ASSERT_TRUE(golden.ok() && strings.ok());
  EXPECT_THAT(*strings, SizeIs(Ge(200)));
  for (const GoldenText& text : golden->texts) {
    EXPECT_THAT(*strings, Contains(AllOf(Field(&GoldenString::text, text.text),
                                         Field(&GoldenString::token_ids, text.token_ids))));
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
