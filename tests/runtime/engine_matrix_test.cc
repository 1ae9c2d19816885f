// Equal tokens whatever the ranks, the batch, the cache, the chunks, the pages and the preemptions.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/covering_array.h"
#include "tests/support/engine_world.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

// What may be combined (anything else is refused before a weight is read):
//
//   model     stripes           data-parallel attention   whole experts   no KV cache
//   GQA, MQA  divisors of N     -                         with experts    with one stripe
//   MLA       divisors of N     with auto or one stripe   with experts    with one stripe, not DP
//
// Batch, chunk, page size, pool, prefix caching and stream go with everything.
struct Setting {
  std::string model;
  int num_ranks = 1;
  size_t batch = 8;
  bool prefix_caching = true;
  int64_t chunk = 0;
  int64_t page_size = 16;
  bool small_pool = false;
  CpuStreamMode stream_mode = CpuStreamMode::kImmediate;
  bool expert_parallel = false;
  int64_t mla_piece_tokens = 0;
  int num_stripes = 1;
  bool dp_attention = false;
  bool exchange_experts = false;

  std::string ToString() const {
    return absl::StrCat(model, ": ", num_ranks, " ranks, batch ", batch, ", prefix caching ",
                        prefix_caching, ", chunk ", chunk, ", page ", page_size, ", small pool ",
                        small_pool, ", deferred ", stream_mode == CpuStreamMode::kDeferred,
                        ", expert parallel ", expert_parallel, ", MLA pieces of ", mla_piece_tokens,
                        ", ", num_stripes, " stripes, DP attention ", dp_attention,
                        ", experts exchanged ", exchange_experts);
  }
};

const std::vector<std::string> kModels = {"gqa-odd", "gqa-a", "mqa", "mistral-window", "tied"};
const std::vector<int> kRanks = {1, 2, 3, 4, 5, 8};
const std::vector<size_t> kBatches = {8, 1};
const std::vector<int64_t> kChunks = {64, 1, 7};
const std::vector<int64_t> kPageSizes = {16, 1, 3, 64, 128};

const std::vector<size_t> kSizes = {
    kModels.size(), kRanks.size(), kBatches.size(), 2, kChunks.size(), kPageSizes.size(), 2, 2};

// The settings that every model has.
Setting CommonSettingOf(const std::vector<size_t>& row, const std::vector<std::string>& models,
                        const std::vector<int>& ranks, const std::vector<int64_t>& page_sizes) {
  Setting setting;
  setting.model = models[row[0]];
  setting.num_ranks = ranks[row[1]];
  setting.batch = kBatches[row[2]];
  setting.prefix_caching = row[3] == 0;
  setting.chunk = kChunks[row[4]];
  setting.page_size = page_sizes[row[5]];
  setting.small_pool = row[6] == 1;
  setting.stream_mode = row[7] == 0 ? CpuStreamMode::kImmediate : CpuStreamMode::kDeferred;
  return setting;
}

Setting SettingOf(const std::vector<size_t>& row) {
  return CommonSettingOf(row, kModels, kRanks, kPageSizes);
}

// Models with latent attention, experts or both; ranks above their heads and experts.
const std::vector<std::string> kDeepSeekModels = {"mla-lite",     "mla-v3",       "mla-v3-fp8",
                                                  "mla-random-0", "mla-random-3", "mixtral"};
const std::vector<int> kDeepSeekRanks = {1, 2, 3, 4, 6, 8};
const std::vector<int64_t> kDeepSeekPageSizes = {64, 1, 3, 16};

const std::vector<size_t> kDeepSeekSizes = {kDeepSeekModels.size(),
                                            kDeepSeekRanks.size(),
                                            kBatches.size(),
                                            2,
                                            kChunks.size(),
                                            kDeepSeekPageSizes.size(),
                                            2,
                                            2,
                                            2,
                                            2};

bool HasLatents(const std::string& model) { return model != "mixtral"; }

Setting DeepSeekSettingOf(const std::vector<size_t>& row) {
  Setting setting = CommonSettingOf(row, kDeepSeekModels, kDeepSeekRanks, kDeepSeekPageSizes);
  setting.expert_parallel = row[8] == 1;
  setting.mla_piece_tokens = row[9] == 0 ? 0 : 64;
  return setting;
}

constexpr int64_t kOutputLength = 12;

// Greedy and sampled requests, half of them behind a common prefix.
std::vector<Request> Requests() {
  std::mt19937 random(7);
  std::uniform_int_distribution<int32_t> token(0, 89);
  std::vector<int32_t> prefix(20);
  for (int32_t& id : prefix) id = token(random);
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) {
    std::vector<int32_t> prompt;
    if (i % 2 == 0) prompt = prefix;
    for (int j = 0; j < 1 + 3 * i; ++j) prompt.push_back(token(random));
    Request request = GreedyRequest(std::move(prompt), kOutputLength);
    if (i % 3 == 1) {
      request.params.temperature = 0.8;
      request.params.seed = 100 + i;
    }
    if (i % 3 == 2) {
      request.params.temperature = 1.2;
      request.params.top_k = 20;
      request.params.top_p = 0.9;
      request.params.seed = 100 + i;
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

// What the longest request needs, and little more; hardly anything where there is one a rank.
int64_t SmallPool(int64_t page_size, bool dp_attention) {
  const int64_t longest = 20 + 1 + 3 * 10 + kOutputLength;
  const int64_t least = (longest + 1 + page_size - 1) / page_size + 1;
  return dp_attention ? least : std::max(least, (2 * longest) / page_size);
}

EngineConfig ConfigOf(const Setting& setting) {
  const absl::StatusOr<GoldenModel> model = LoadGoldenModel(setting.model);
  EngineConfig config = TestEngineConfig(model->path);
  config.max_model_len = model->max_model_len;
  config.max_num_seqs = static_cast<int64_t>(setting.batch);
  config.max_num_batched_tokens = 256;
  config.enable_prefix_caching = setting.prefix_caching;
  config.prefill_chunk = setting.chunk;
  config.block_size = setting.page_size;
  config.num_kv_pages =
      setting.small_pool ? SmallPool(setting.page_size, setting.dp_attention) : 1024;
  config.stream_mode = setting.stream_mode;
  config.enable_expert_parallel = setting.expert_parallel;
  config.mla_piece_tokens = setting.mla_piece_tokens;
  config.num_stripes = setting.num_stripes;
  config.enable_dp_attention = setting.dp_attention;
  config.exchange_experts = setting.exchange_experts;
  return config;
}

std::vector<std::vector<int32_t>> TokensOf(const EngineRun& run) {
  std::vector<std::vector<int32_t>> tokens;
  for (const std::vector<CollectedSequence>& sequences : run.results) {
    tokens.push_back(sequences.front().token_ids);
  }
  return tokens;
}

class EngineMatrix : public ::testing::Test {
 protected:
  // Counts what the settings are meant to bring about.
  void Check(const Setting& setting) {
    const std::vector<Request> requests = Requests();
    const absl::StatusOr<EngineRun> run =
        RunRequests(ConfigOf(setting), setting.num_ranks, requests);
    ASSERT_TRUE(run.ok()) << setting.ToString() << ": " << run.status();
    EXPECT_EQ(TokensOf(*run), ReferenceOf(setting.model)) << setting.ToString();
    EXPECT_EQ(run->stats.num_failed_sequences, 0);
    EXPECT_EQ(run->stats.num_finished_sequences, static_cast<int64_t>(requests.size()));
    EXPECT_EQ(run->stats.num_running + run->stats.num_waiting, 0);
    num_preemptions_ += run->stats.num_preemptions;
    if (setting.prefix_caching) {
      num_cached_tokens_ += run->stats.num_cached_tokens;
    } else {
      EXPECT_EQ(run->stats.num_cached_tokens, 0) << setting.ToString();
    }
  }

  // One rank, one request at a time, whole prompts, no cache at all.
  const std::vector<std::vector<int32_t>>& ReferenceOf(const std::string& model) {
    std::vector<std::vector<int32_t>>& reference = references_[model];
    if (reference.empty()) {
      Setting setting;
      setting.model = model;
      setting.batch = 1;
      EngineConfig config = ConfigOf(setting);
      config.use_kv_cache = false;
      const absl::StatusOr<EngineRun> run = RunRequests(config, 1, Requests());
      EXPECT_TRUE(run.ok()) << run.status();
      if (run.ok()) reference = TokensOf(*run);
    }
    return reference;
  }

  std::map<std::string, std::vector<std::vector<int32_t>>> references_;
  int64_t num_preemptions_ = 0;
  int64_t num_cached_tokens_ = 0;
};

TEST_F(EngineMatrix, PairsOfSettings) {
  for (const std::vector<size_t>& row : PairwiseCoveringArray(kSizes)) Check(SettingOf(row));
  EXPECT_GT(num_preemptions_, 0);
  EXPECT_GT(num_cached_tokens_, 0);
}

// Heads dealt over the ranks, whole sequences, or these with tokens that travel to their experts.
TEST_F(EngineMatrix, PairsOfDeepSeekSettings) {
  std::vector<size_t> sizes = kDeepSeekSizes;
  sizes.push_back(3);
  std::set<int> ranks, exchanging_ranks;
  std::set<int64_t> page_sizes;
  int64_t num_preemptions = 0, num_cached_tokens = 0;  // with whole sequences dealt
  for (const std::vector<size_t>& row : PairwiseCoveringArray(sizes)) {
    Setting setting = DeepSeekSettingOf(row);
    setting.dp_attention = row.back() > 0 && HasLatents(setting.model);
    setting.exchange_experts = row.back() == 2 && setting.dp_attention;
    setting.expert_parallel = setting.expert_parallel || setting.exchange_experts;
    if (setting.exchange_experts) exchanging_ranks.insert(setting.num_ranks);
    num_preemptions -= setting.dp_attention ? num_preemptions_ : 0;
    num_cached_tokens -= setting.dp_attention ? num_cached_tokens_ : 0;
    Check(setting);
    if (!setting.dp_attention) continue;
    num_preemptions += num_preemptions_;
    num_cached_tokens += num_cached_tokens_;
    ranks.insert(setting.num_ranks);
    page_sizes.insert(setting.page_size);
  }
  EXPECT_GT(num_preemptions_, num_preemptions);
  EXPECT_GT(num_cached_tokens_, num_cached_tokens);
  EXPECT_GT(num_preemptions, 0);
  EXPECT_GT(num_cached_tokens, 0);
  EXPECT_EQ(ranks.size(), kDeepSeekRanks.size());
  EXPECT_EQ(exchanging_ranks.size(), kDeepSeekRanks.size());
  EXPECT_EQ(page_sizes.size(), kDeepSeekPageSizes.size());
}

// The same on striped caches: rank counts with every number of stripes that divides them.
const std::vector<std::pair<int, int>> kGrids = {{2, 2}, {3, 3}, {4, 2}, {4, 4}, {6, 2},
                                                 {6, 3}, {6, 6}, {8, 2}, {8, 4}, {8, 8}};

TEST_F(EngineMatrix, PairsOfStripedSettings) {
  for (const bool deep_seek : {false, true}) {
    std::vector<size_t> sizes = deep_seek ? kDeepSeekSizes : kSizes;
    sizes[1] = kGrids.size();
    for (std::vector<size_t> row : PairwiseCoveringArray(sizes)) {
      const auto [num_ranks, num_stripes] = kGrids[row[1]];
      row[1] = 0;
      Setting setting = deep_seek ? DeepSeekSettingOf(row) : SettingOf(row);
      setting.num_ranks = num_ranks;
      setting.num_stripes = num_stripes;
      Check(setting);
    }
  }
  EXPECT_GT(num_preemptions_, 0);
  EXPECT_GT(num_cached_tokens_, 0);
}

class NightlyEngineMatrix : public EngineMatrix {};

// Every grid of up to 8 ranks and, behind them, whole sequences dealt; with everything else that
// decides where a latent or an expert is.
TEST_F(NightlyEngineMatrix, AllDeepSeekPlacements) {
  for (const std::string model : {"mla-v3", "mla-lite"}) {
    for (const int num_ranks : kDeepSeekRanks) {
      for (const std::vector<size_t>& row :
           FullProduct({static_cast<size_t>(num_ranks) + 1, kDeepSeekPageSizes.size(), 2, 2, 2})) {
        Setting setting;
        setting.model = model;
        setting.num_ranks = num_ranks;
        setting.dp_attention = static_cast<int>(row[0]) == num_ranks;
        setting.num_stripes = setting.dp_attention ? 1 : static_cast<int>(row[0]) + 1;
        if (num_ranks % setting.num_stripes != 0) continue;
        setting.page_size = kDeepSeekPageSizes[row[1]];
        setting.prefix_caching = row[2] == 0;
        setting.small_pool = row[3] == 1;
        setting.expert_parallel = row[4] == 1;
        Check(setting);
        if (!setting.dp_attention || !setting.expert_parallel) continue;
        setting.exchange_experts = true;
        Check(setting);
      }
    }
  }
  EXPECT_GT(num_preemptions_, 0);
  EXPECT_GT(num_cached_tokens_, 0);
}

// Of the two kinds of stream each setting has one, its neighbours the other.
TEST_F(NightlyEngineMatrix, AllSettings) {
  std::vector<size_t> sizes = kSizes;
  sizes.back() = 1;
  for (std::vector<size_t> row : FullProduct(sizes)) {
    row.back() = std::accumulate(row.begin(), row.end(), size_t{0}) % 2;
    Check(SettingOf(row));
  }
}

class EngineBits : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, EngineBits, ::testing::Values("gqa-odd", "mla-v3"),
                         [](const auto& test) { return test.param == "mla-v3" ? "mla" : "gqa"; });

// At a fixed rank count the promise is stronger: equal bits, also of what a narrow cache rounds.
TEST_P(EngineBits, AreThoseOfLogprobs) {
  const std::vector<DType> cache_dtypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  const std::vector<std::pair<int, bool>> all_ranks = {{1, false}, {3, false}, {3, true}};
  for (const auto& [num_ranks, dp_attention] : all_ranks) {
    if (dp_attention && GetParam() != "mla-v3") continue;
    std::map<DType, std::vector<std::vector<float>>> references;
    for (const std::vector<size_t>& row : PairwiseCoveringArray({2, 2, 3, 5, 2, 2, 3, 2})) {
      Setting setting;
      setting.model = GetParam();
      setting.num_ranks = num_ranks;
      setting.dp_attention = dp_attention;
      setting.batch = kBatches[row[0]];
      setting.prefix_caching = row[1] == 0;
      setting.chunk = kChunks[row[2]];
      setting.page_size = kPageSizes[row[3]];
      setting.small_pool = row[4] == 1;
      setting.mla_piece_tokens = row[7] == 0 ? 0 : 64;
      EngineConfig config = ConfigOf(setting);
      config.num_threads = 1 + static_cast<int>(row[5]);
      config.enable_expert_parallel = dp_attention;
      config.exchange_experts = dp_attention;
      config.kv_cache_dtype = cache_dtypes[row[6]];
      std::vector<Request> requests = Requests();
      for (Request& request : requests) request.params.logprobs = 3;
      const absl::StatusOr<EngineRun> run = RunRequests(config, num_ranks, requests);
      ASSERT_TRUE(run.ok()) << run.status();
      std::vector<std::vector<float>> logprobs;
      for (const std::vector<CollectedSequence>& sequences : run->results) {
        std::vector<float>& values = logprobs.emplace_back();
        for (const PositionLogprobs& position : sequences.front().logprobs) {
          values.push_back(position.chosen.logprob);
          for (const TokenLogprob& top : position.top) values.push_back(top.logprob);
        }
        EXPECT_EQ(values.size(), 4u * kOutputLength);
      }
      const auto reference = references.emplace(*config.kv_cache_dtype, logprobs).first;
      EXPECT_EQ(logprobs, reference->second) << setting.ToString() << ", " << config.num_threads
                                             << " threads, " << DTypeName(*config.kv_cache_dtype);
    }
  }
}

TEST(CoveringArray, HoldsEveryPairOfValues) {
  const auto rows = PairwiseCoveringArray(kSizes);
  EXPECT_LT(rows.size() * 8, FullProduct(kSizes).size());
  for (size_t a = 0; a < kSizes.size(); ++a) {
    for (size_t b = 0; b < kSizes.size(); ++b) {
      std::set<std::pair<size_t, size_t>> pairs;
      for (const std::vector<size_t>& row : rows) pairs.insert({row[a], row[b]});
      EXPECT_EQ(pairs.size(), a == b ? kSizes[a] : kSizes[a] * kSizes[b]);
    }
  }
}

}  // namespace
}  // namespace heddle
