// The whole engine against transformers: logits of prompts and greedy continuations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/engine_world.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

struct GoldenCase {
  std::string name;
  bool gguf;
};

std::vector<GoldenCase> AllGoldens() {
  std::vector<GoldenCase> cases;
  for (const std::string& name : GoldenModelNames()) cases.push_back({name, false});
  for (const std::string& name : GoldenGgufNames()) cases.push_back({name, true});
  return cases;
}

class EngineGolden : public ::testing::TestWithParam<std::tuple<GoldenCase, int>> {
 protected:
  void SetUp() override {
    const GoldenCase& golden = std::get<0>(GetParam());
    absl::StatusOr<GoldenModel> model =
        golden.gguf ? LoadGoldenGguf(golden.name) : LoadGoldenModel(golden.name);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    config_ = TestEngineConfig(model_.path);
    config_.max_model_len = model_.max_model_len;
    config_.num_kv_pages = 256;
  }

  int num_ranks() const { return std::get<1>(GetParam()); }

  void ExpectLogits() {
    std::vector<Request> requests;
    for (const GoldenPrompt& prompt : model_.prompts) {
      Request request = GreedyRequest(prompt.token_ids, 0);
      request.params.prompt_logits = true;
      requests.push_back(std::move(request));
    }
    const absl::StatusOr<EngineRun> run = RunRequests(config_, num_ranks(), requests);
    ASSERT_TRUE(run.ok()) << run.status();
    const auto [low, high] = std::minmax_element(model_.logits.begin(), model_.logits.end());
    const float tolerance = 1e-4f * (*high - *low);
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::vector<float>& logits = run->results[i].front().prompt_logits;
      const std::span<const float> expected = model_.prompts[i].logits;
      ASSERT_EQ(logits.size(), expected.size()) << model_.prompts[i].id;
      float largest = 0.0f;
      for (size_t j = 0; j < logits.size(); ++j) {
        ASSERT_TRUE(std::isfinite(logits[j]));
        largest = std::max(largest, std::abs(logits[j] - expected[j]));
      }
      EXPECT_LE(largest, tolerance) << model_.prompts[i].id;
    }
  }

  GoldenModel model_;
  EngineConfig config_;
};

TEST_P(EngineGolden, LogitsOfPrompts) { ExpectLogits(); }

TEST_P(EngineGolden, LogitsTokenByToken) {
  config_.prefill_chunk = 1;
  config_.stream_mode = CpuStreamMode::kDeferred;
  ExpectLogits();
}

TEST_P(EngineGolden, LogitsWithoutACache) {
  config_.use_kv_cache = false;
  ExpectLogits();
}

// Where the best two logits are nearer than this, rounding may choose the other one.
constexpr float kMargin = 1e-3f;

TEST_P(EngineGolden, GreedyContinuationsGivenTheOnesBefore) {
  std::vector<Request> requests;
  for (const GoldenPrompt& prompt : model_.prompts) {
    std::vector<int32_t> tokens = prompt.token_ids;
    for (const GoldenStep& step : prompt.greedy) tokens.push_back(step.token_id);
    tokens.pop_back();
    requests.push_back(GreedyRequest(std::move(tokens), 0));
    requests.back().params.prompt_logits = true;
  }
  config_.prefill_chunk = 1;
  const absl::StatusOr<EngineRun> run = RunRequests(config_, num_ranks(), requests);
  ASSERT_TRUE(run.ok()) << run.status();
  int64_t num_compared = 0;
  int64_t num_steps = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const GoldenPrompt& prompt = model_.prompts[i];
    const std::vector<float>& logits = run->results[i].front().prompt_logits;
    for (size_t j = 0; j < prompt.greedy.size(); ++j, ++num_steps) {
      if (prompt.greedy[j].top2_gap < kMargin) continue;
      ++num_compared;
      const auto row = logits.begin() + (prompt.token_ids.size() - 1 + j) * model_.vocab_size;
      EXPECT_EQ(std::max_element(row, row + model_.vocab_size) - row, prompt.greedy[j].token_id)
          << prompt.id << " token " << j;
    }
  }
  EXPECT_GE(num_compared * 100, num_steps * 95);
}

TEST_P(EngineGolden, GreedyContinuations) {
  std::vector<Request> requests;
  for (const GoldenPrompt& prompt : model_.prompts) {
    requests.push_back(GreedyRequest(prompt.token_ids, static_cast<int64_t>(prompt.greedy.size())));
  }
  const absl::StatusOr<EngineRun> run = RunRequests(config_, num_ranks(), requests);
  ASSERT_TRUE(run.ok()) << run.status();
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::vector<int32_t>& ids = run->results[i].front().token_ids;
    const std::vector<GoldenStep>& greedy = model_.prompts[i].greedy;
    ASSERT_EQ(ids.size(), greedy.size());
    // Past a choice that rounding decides the texts may differ.
    for (size_t j = 0; j < greedy.size() && greedy[j].top2_gap >= kMargin; ++j) {
      ASSERT_EQ(ids[j], greedy[j].token_id) << model_.prompts[i].id << " token " << j;
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<EngineGolden::ParamType>& info) {
  std::string name = std::get<0>(info.param).name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name + "_on_" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Models, EngineGolden,
                         ::testing::Combine(::testing::ValuesIn(AllGoldens()),
                                            ::testing::Values(1, 3)),
                         NameOf);

}  // namespace
}  // namespace heddle
