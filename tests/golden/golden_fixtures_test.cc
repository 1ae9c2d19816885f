// The fixtures themselves: complete, consistent, and sharp enough to tell a wrong engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

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

// Rounding must not choose other experts than transformers did: margins far above it.
constexpr float kLeastRouterMargin = 1e-4f;
constexpr float kClearRouterMargin = 1e-3f;

void ExpectClearlyRouted(const GoldenModel& model) {
  int64_t num_clear = 0;
  int64_t num_positions = 0;
  for (const GoldenPrompt& prompt : model.prompts) {
    SCOPED_TRACE(model.path + " " + prompt.id);
    ASSERT_THAT(prompt.router_margins, SizeIs(prompt.token_ids.size()));
    EXPECT_EQ(prompt.greedy.front().router_margin, prompt.router_margins.back());
    std::vector<float> margins = prompt.router_margins;
    for (const GoldenStep& step : prompt.greedy) margins.push_back(step.router_margin);
    EXPECT_THAT(margins, Each(AllOf(Ge(kLeastRouterMargin), Le(2))));
    num_clear += std::count_if(margins.begin(), margins.end(),
                               [](float margin) { return margin >= kClearRouterMargin; });
    num_positions += static_cast<int64_t>(margins.size());
  }
  EXPECT_GE(num_clear * 100, num_positions * 95) << model.path;
}

TEST(GoldenFixturesTest, ModelsAreConsistent) {
  EXPECT_THAT(GoldenLlamaModelNames(),
              IsSupersetOf({"gqa-a", "gqa-odd", "hd", "llama-biases", "mha", "mistral-window",
                            "mqa", "mqa-two-shards", "qw2", "qw2-window", "qwen3", "rope-dynamic",
                            "rope-linear", "rope-llama3", "rope-yarn", "tied"}));
  for (const std::string& name : GoldenModelNames()) {
    const auto model = LoadGoldenModel(name);
    ASSERT_TRUE(model.ok()) << model.status();
    ExpectConsistent(*model);
  }
}

TEST(GoldenFixturesTest, MlaAndMoeModelsAreConsistent) {
  std::vector<std::string> names = GoldenModelNames();
  EXPECT_THAT(names, IsSupersetOf({"kimi-k2", "mixtral", "mla-dense", "mla-lite",
                                   "mla-lite-rope-parameters", "mla-v3", "mla-v3-fp8",
                                   "mla-v3-fp8-oblong", "qwen3-moe", "qwen3-moe-sparse-step"}));
  for (int i = 0; i < 10; ++i) EXPECT_THAT(names, Contains("mla-random-" + std::to_string(i)));
  for (const std::string& name : GoldenLlamaModelNames()) std::erase(names, name);
  for (const std::string& name : names) {
    const auto model = LoadGoldenModel(name);
    ASSERT_TRUE(model.ok()) << model.status();
    ExpectConsistent(*model);
    if (name != "mla-dense") ExpectClearlyRouted(*model);
  }
}

// Fault class B7: one model, two spellings of its rotary parameters.
TEST(GoldenFixturesTest, BothSpellingsOfRopeParametersAreTheSameModel) {
  const auto older = LoadGoldenModel("mla-lite");
  const auto newer = LoadGoldenModel("mla-lite-rope-parameters");
  ASSERT_TRUE(older.ok() && newer.ok());
  EXPECT_EQ(older->logits, newer->logits);
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

TEST(NumClearlyRoutedTest, EndsAtTheFirstUnclearPosition) {
  GoldenPrompt prompt;
  prompt.token_ids = {5, 6, 7};
  prompt.greedy.resize(4);
  EXPECT_EQ(NumClearlyRouted(prompt, 0.1f), 6);  // no experts
  prompt.router_margins = {0.3f, 0.2f, 0.5f};
  prompt.greedy[0].router_margin = 0.5f;
  prompt.greedy[1].router_margin = 0.2f;
  prompt.greedy[2].router_margin = 0.05f;
  prompt.greedy[3].router_margin = 0.9f;
  EXPECT_EQ(NumClearlyRouted(prompt, 0.01f), 6);
  EXPECT_EQ(NumClearlyRouted(prompt, 0.1f), 4);
  EXPECT_EQ(NumClearlyRouted(prompt, 0.25f), 1);
  EXPECT_EQ(NumClearlyRouted(prompt, 0.4f), 0);
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
