// The real model, SmolLM2-135M-Instruct, against transformers on the same de-quantised weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/status_macros.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/text/tokenizer.h"
#include "tests/runtime/model/prompt_runner.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

// Where the best two logits are nearer than this, rounding may choose the other one.
constexpr float kMargin = 1e-3f;

class SmolLm2Test : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* path = std::getenv("HEDDLE_SMOLLM2");
    if (path == nullptr) {
      GTEST_SKIP() << "HEDDLE_SMOLLM2 is not set; launch/fetch_model.sh prints what to set it to";
    }
    path_ = path;
    absl::StatusOr<GoldenSmolLm2> golden = LoadGoldenSmolLm2();
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }

  absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer() const {
    ASSIGN_OR_RETURN(Checkpoint checkpoint, OpenCheckpoint(path_, LoadFormat::kAuto, /*seed=*/0));
    if (!checkpoint.gguf_vocabulary.has_value()) return absl::NotFoundError("no vocabulary");
    return MakeGgufTokenizer(*checkpoint.gguf_vocabulary);
  }

  std::string path_;
  GoldenSmolLm2 golden_;
};

// log(softmax(row)[token_id])
double LogProbability(std::span<const float> row, int32_t token_id) {
  const float largest = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float logit : row) sum += std::exp(double{logit} - largest);
  return double{row[token_id]} - largest - std::log(sum);
}

class SmolLm2RanksTest : public SmolLm2Test, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SmolLm2RanksTest, ::testing::Values(1, 2, 5));
INSTANTIATE_TEST_SUITE_P(Nightly, SmolLm2RanksTest, ::testing::Values(3, 4));

// Fed with transformers' own tokens, each next token is the one it chose.
TEST_P(SmolLm2RanksTest, ChoosesTheTokensOfTransformers) {
  Prompts prompts;
  for (const GoldenText& text : golden_.texts) {
    std::vector<int32_t>& ids = prompts.emplace_back(text.token_ids);
    for (const GoldenStep& step : text.greedy) ids.push_back(step.token_id);
  }
  const auto logits =
      PromptLogits(path_, prompts, {.num_ranks = GetParam(), .chunk = 64, .max_model_len = 512});
  ASSERT_TRUE(logits.ok()) << logits.status();

  int num_compared = 0;
  int num_tokens = 0;
  for (size_t p = 0; p < prompts.size(); ++p) {
    const GoldenText& text = golden_.texts[p];
    SCOPED_TRACE(text.id);
    const int64_t vocab_size = (*logits)[p].size() / prompts[p].size();
    for (size_t position = 0; position + 1 < prompts[p].size(); ++position) {
      const auto row = std::span((*logits)[p]).subspan(position * vocab_size, vocab_size);
      EXPECT_NEAR(LogProbability(row, prompts[p][position + 1]), text.token_logprobs[position],
                  1e-3);
      if (position + 1 < text.token_ids.size()) continue;
      const GoldenStep& step = text.greedy[position + 1 - text.token_ids.size()];
      ++num_tokens;
      if (step.top2_gap < kMargin) continue;
      ++num_compared;
      const auto best = std::max_element(row.begin(), row.end());
      EXPECT_EQ(best - row.begin(), step.token_id) << "position " << position;
    }
  }
  EXPECT_GE(num_tokens, 20 * 64);
  EXPECT_GE(num_compared, 0.95 * num_tokens);
}

class NightlySmolLm2Test : public SmolLm2Test {
 protected:
  // Of the golden text's windows, each scored from its second token on.
  double Perplexity(const std::vector<int32_t>& ids, ActivationPrecision precision) {
    const size_t window = golden_.perplexity.window;
    double total = 0;
    int64_t num_scored = 0;
    for (size_t begin = 0; begin < ids.size(); begin += window) {
      const size_t end = std::min(begin + window, ids.size());
      const Prompts prompt = {std::vector<int32_t>(ids.begin() + begin, ids.begin() + end)};
      const auto logits = PromptLogits(path_, prompt,
                                       {.num_threads = 2,
                                        .max_model_len = static_cast<int64_t>(window),
                                        .precision = precision});
      EXPECT_TRUE(logits.ok()) << logits.status();
      if (!logits.ok()) return 0;
      const size_t vocab_size = logits->front().size() / prompt[0].size();
      for (size_t i = 0; i + 1 < prompt[0].size(); ++i, ++num_scored) {
        const auto row = std::span(logits->front()).subspan(i * vocab_size, vocab_size);
        total += LogProbability(row, prompt[0][i + 1]);
      }
    }
    return std::exp(-total / static_cast<double>(num_scored));
  }
};

TEST_F(NightlySmolLm2Test, HasThePerplexityOfTransformers) {
  std::ifstream file(golden_.perplexity.text_path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto tokenizer = LoadTokenizer();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto ids = (*tokenizer)->Encode(text, /*add_special_tokens=*/false);
  ASSERT_TRUE(ids.ok()) << ids.status();
  ASSERT_EQ(static_cast<int64_t>(ids->size()), golden_.perplexity.num_tokens);

  const double exact = Perplexity(*ids, ActivationPrecision::kFloat32);
  EXPECT_NEAR(exact, golden_.perplexity.value, 1e-3);
  // What the default, activations of eight bits, costs.
  const double rounded = Perplexity(*ids, ActivationPrecision::kInt8);
  std::cout << "perplexity " << exact << ", with int8 activations " << rounded << "\n";
  EXPECT_LE(rounded, exact * 1.005);
}

TEST_F(SmolLm2Test, SplitsTextAsHuggingFaceDoes) {
  const auto strings = LoadGoldenSmolLm2Strings();
  ASSERT_TRUE(strings.ok()) << strings.status();
  const auto tokenizer = LoadTokenizer();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const GoldenString& string : *strings) {
    const auto ids = (*tokenizer)->Encode(string.text, /*add_special_tokens=*/false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, string.token_ids) << ::testing::PrintToString(string.text);
    EXPECT_EQ((*tokenizer)->Decode(string.token_ids, /*skip_special_tokens=*/false),
              string.decoded);
  }
}

}  // namespace
}  // namespace heddle
