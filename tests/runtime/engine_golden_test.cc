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

std::vector<GoldenCase> BlockFp8Goldens() {
  return {{"mla-v3-fp8", false}, {"mla-v3-fp8-oblong", false}};
}

std::vector<GoldenCase> AllGoldens() {
  std::vector<GoldenCase> cases;
  for (const std::string& name : GoldenModelNames()) {
    cases.push_back({name, false});
  }
  for (const std::string& name : GoldenGgufNames()) cases.push_back({name, true});
  return cases;
}

// Where the best two logits, or the last expert chosen and the first that is not, are nearer than
// this, rounding may choose the other one. At most one position in twenty goes unchecked for it.
constexpr float kMargin = 1e-3f;
constexpr float kRouterMargin = 5e-5f;

bool IsMostOf(int64_t num_compared, int64_t total) { return num_compared * 100 >= total * 95; }

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
    int64_t num_compared = 0;
    int64_t num_rows = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      const GoldenPrompt& prompt = model_.prompts[i];
      const std::vector<float>& logits = run->results[i].front().prompt_logits;
      ASSERT_EQ(logits.size(), prompt.logits.size()) << prompt.id;
      const auto rows = static_cast<int64_t>(prompt.token_ids.size());
      const int64_t clear_rows = std::min(rows, NumClearlyRouted(prompt, kRouterMargin));
      num_rows += rows;
      num_compared += clear_rows;
      float largest = 0.0f;
      for (int64_t j = 0; j < rows * model_.vocab_size; ++j) {
        ASSERT_TRUE(std::isfinite(logits[j]));
        if (j >= clear_rows * model_.vocab_size) continue;
        largest = std::max(largest, std::abs(logits[j] - prompt.logits[j]));
      }
      EXPECT_LE(largest, tolerance) << prompt.id;
    }
    EXPECT_TRUE(IsMostOf(num_compared, num_rows)) << num_compared << " of " << num_rows;
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
    const int64_t num_clear = NumClearlyRouted(prompt, kRouterMargin);
    for (size_t j = 0; j < prompt.greedy.size(); ++j, ++num_steps) {
      const auto position = static_cast<int64_t>(prompt.token_ids.size() - 1 + j);
      if (position >= num_clear || prompt.greedy[j].top2_gap < kMargin) continue;
      ++num_compared;
      const auto row = logits.begin() + position * model_.vocab_size;
      EXPECT_EQ(std::max_element(row, row + model_.vocab_size) - row, prompt.greedy[j].token_id)
          << prompt.id << " token " << j;
    }
  }
  EXPECT_TRUE(IsMostOf(num_compared, num_steps)) << num_compared << " of " << num_steps;
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
    const int64_t num_clear = NumClearlyRouted(model_.prompts[i], kRouterMargin) -
                              static_cast<int64_t>(model_.prompts[i].token_ids.size() - 1);
    // Past a choice that rounding decides the texts may differ.
    for (int64_t j = 0; j < std::min<int64_t>(num_clear, greedy.size()); ++j) {
      if (greedy[j].top2_gap < kMargin) break;
      ASSERT_EQ(ids[j], greedy[j].token_id) << model_.prompts[i].id << " token " << j;
    }
  }
}

// Heads, FFN columns and experts cut the blocks of scales in other places at each number of ranks.
class BlockFp8Golden : public EngineGolden {};

TEST_P(BlockFp8Golden, LogitsWithColumnsDealt) { ExpectLogits(); }

TEST_P(BlockFp8Golden, LogitsWithWholeExpertsDealt) {
  config_.enable_expert_parallel = true;
  ExpectLogits();
}

// Each sequence whole on one rank, experts over all.
class DpAttentionGolden : public EngineGolden {
 protected:
  void SetUp() override {
    EngineGolden::SetUp();
    config_.enable_dp_attention = true;
  }
};

TEST_P(DpAttentionGolden, LogitsWithColumnsDealt) { ExpectLogits(); }

TEST_P(DpAttentionGolden, LogitsWithWholeExpertsDealt) {
  config_.enable_expert_parallel = true;
  ExpectLogits();
}

TEST_P(DpAttentionGolden, LogitsTokenByTokenThatTravelToTheirExperts) {
  config_.enable_expert_parallel = true;
  config_.exchange_experts = true;
  config_.prefill_chunk = 1;
  config_.stream_mode = CpuStreamMode::kDeferred;
  ExpectLogits();
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
INSTANTIATE_TEST_SUITE_P(Models, DpAttentionGolden,
                         ::testing::Combine(::testing::Values(GoldenCase{"mla-lite", false},
                                                              GoldenCase{"mla-v3", false}),
                                            ::testing::Values(3)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Models, BlockFp8Golden,
                         ::testing::Combine(::testing::ValuesIn(BlockFp8Goldens()),
                                            ::testing::Values(1, 2, 3, 5)),
                         NameOf);

}  // namespace
}  // namespace heddle
