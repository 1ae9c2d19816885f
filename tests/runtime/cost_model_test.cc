#include "runtime/cost_model.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/checkpoint/declared_weights.h"
#include "runtime/stripe_choice.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kGiga = 1e9;

ModelSpec SpecOf(absl::string_view model) {
  const std::string path =
      absl::StrCat(HEDDLE_TESTS_DIR, "/../configs/models/", model, "/config.json");
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::stringstream text;
  text << file.rdbuf();
  absl::StatusOr<ModelSpec> spec = ParseModelConfig(text.str(), path);
  EXPECT_TRUE(spec.ok()) << spec.status();
  return *std::move(spec);
}

// With all matrices in one type.
ModelCosts CostsIn(const ModelSpec& spec, DType matrices, DType kv = DType::kBFloat16) {
  return CostsOf(spec, *MakeDeclaredWeights(spec, matrices), kv);
}

DeviceFigures Gpu(absl::string_view name) { return *FindDevice(name, 1); }

double TokensPerSecond(const StepTime& time, int64_t batch) {
  return static_cast<double>(batch) / time.total();
}

// Off by no more than this share of what is expected.
MATCHER_P2(IsWithin, share, expected, "") {
  return std::abs(static_cast<double>(arg) - expected) <= share * expected;
}

TEST(CostModel, CountsParameters) {
  struct Case {
    const char* model;
    double parameters, active;
  };
  for (const Case& one : {Case{"deepseek-v2-lite", 15.71e9, 2.45e9},
                          {"deepseek-v3", 671.03e9, 36.62e9},
                          {"llama-3-8b", 8.03e9, 7.50e9},
                          {"llama-2-70b", 68.98e9, 68.72e9}}) {
    const ModelCosts costs = CostsIn(SpecOf(one.model), DType::kBFloat16);
    EXPECT_THAT(costs.parameters, IsWithin(1e-3, one.parameters)) << one.model;
    EXPECT_THAT(costs.ActiveParameters(), IsWithin(2e-3, one.active)) << one.model;
    // One token reads what it is multiplied by.
    EXPECT_THAT(costs.ReadBytes(1), IsWithin(1e-3, 2 * costs.ActiveParameters())) << one.model;
  }
}

TEST(CostModel, TouchesEachExpertOnce) {
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  EXPECT_DOUBLE_EQ(v3.TouchedExperts(1), 8.0 / 256);
  EXPECT_NEAR(v3.TouchedExperts(2), 1 - std::pow(1 - 8.0 / 256, 2), 1e-12);
  EXPECT_NEAR(v3.TouchedExperts(10000), 1, 1e-9);
  EXPECT_EQ(CostsIn(SpecOf("llama-3-8b"), DType::kBFloat16).TouchedExperts(5), 0);
}

TEST(CostModel, BytesOfKeysAndValuesByKind) {
  using Kind = KvBytesByKind::Kind;
  const KvBytesByKind v3 = KvBytesOf(CostsIn(SpecOf("deepseek-v3"), DType::kBFloat16));
  EXPECT_EQ(v3.own, Kind::kMla);
  EXPECT_EQ(v3.mla, 70272);
  EXPECT_EQ(v3.mha, 2 * 128 * 128 * 61 * 2);
  EXPECT_EQ(v3.gqa, 2 * 8 * 128 * 61 * 2);
  EXPECT_EQ(v3.mqa, 2 * 128 * 61 * 2);
  // DeepSeek-V2, table 1: a latent costs what GQA with 2.25 groups does.
  EXPECT_DOUBLE_EQ(static_cast<double>(v3.mla) / static_cast<double>(v3.mqa), 2.25);

  const KvBytesByKind lite = KvBytesOf(CostsIn(SpecOf("deepseek-v2-lite"), DType::kBFloat16));
  EXPECT_EQ(lite.mla, 31104);
  const KvBytesByKind llama = KvBytesOf(CostsIn(SpecOf("llama-3-8b"), DType::kBFloat16));
  EXPECT_EQ(llama.own, Kind::kGqa);
  EXPECT_EQ(llama.gqa_heads, 8);
  EXPECT_EQ(llama.gqa, 131072);
  EXPECT_EQ(llama.mla, llama.mqa * 9 / 4);
  EXPECT_EQ(KvBytesOf(CostsIn(SpecOf("llama-2-70b"), DType::kBFloat16)).gqa, 327680);
  // float32 on a CPU.
  EXPECT_EQ(KvBytesOf(CostsIn(SpecOf("llama-3-8b"), DType::kBFloat16, DType::kFloat32)).gqa,
            2 * 131072);

  ModelSpec odd = SpecOf("llama-3-8b");
  odd.total_query_heads = odd.total_kv_heads = 12;  // MHA, and no 8 KV heads
  EXPECT_EQ(KvBytesOf(CostsIn(odd, DType::kBFloat16)).own, Kind::kMha);
  EXPECT_EQ(KvBytesOf(CostsIn(odd, DType::kBFloat16)).gqa_heads, 6);
  odd.total_kv_heads = 1;
  EXPECT_EQ(KvBytesOf(CostsIn(odd, DType::kBFloat16)).own, Kind::kMqa);
}

// A much-copied article prints 37 GB.
TEST(CostModel, Gpt3NeedsTwoHundredEightyEightGibibytes) {
  ModelSpec spec = SpecOf("llama-2-70b");
  spec.num_layers = 96;
  spec.windows.assign(96, 0);
  spec.hidden_size = 12288;
  spec.total_query_heads = spec.total_kv_heads = 96;
  spec.head_dim = 128;
  const KvBytesByKind bytes = KvBytesOf(CostsIn(spec, DType::kFloat16, DType::kFloat16));
  EXPECT_EQ(bytes.mha, 4718592);
  EXPECT_EQ(bytes.mha * 32 * 2048, int64_t{288} << 30);
  EXPECT_NEAR(static_cast<double>(bytes.mha * 32 * 2048) / kGiga, 309, 0.5);
}

TEST(CostModel, HeadsThatMakeAttentionComputeBound) {
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  struct Case {
    const char* device;
    double exact;
  };
  for (const Case& one : {Case{"H200", 109}, {"H100", 156}, {"A100", 81}, {"H20", 20}}) {
    EXPECT_NEAR(HeadsToBeComputeBound(v3, Gpu(one.device)).exact, one.exact, 0.5) << one.device;
  }
  EXPECT_NEAR(HeadsToBeComputeBound(v3, Gpu("A6000")).simple, 101, 0.5);
  EXPECT_NEAR(HeadsToBeComputeBound(v3, Gpu("A6000")).exact, 106.7, 0.1);
  // Grouped queries: 4 d operations a head, 4 d bytes a key and value.
  const ModelCosts llama = CostsIn(SpecOf("llama-3-8b"), DType::kBFloat16);
  EXPECT_NEAR(HeadsToBeComputeBound(llama, Gpu("H200")).exact, 206, 0.1);

  const ModelSpec& spec = v3.spec;
  EXPECT_EQ(HeadsPerRead(spec, {.num_ranks = 8, .num_stripes = 1}), 16);
  EXPECT_EQ(HeadsPerRead(spec, {.num_ranks = 8, .num_stripes = 4}), 64);
  EXPECT_EQ(HeadsPerRead(spec, {.num_ranks = 8, .num_stripes = 8}), 128);
  EXPECT_EQ(HeadsPerRead(spec, {.num_ranks = 8, .num_stripes = 1, .dp_attention = true}), 128);
  EXPECT_EQ(HeadsPerRead(spec, {.num_ranks = 6, .num_stripes = 1}), 22);
  // 8 KV heads of 4: whole groups up to 8 ranks, halves on 16, and a rank of its own beyond 32.
  for (const auto& [ranks, heads] :
       std::vector<std::pair<int, int>>{{1, 4}, {2, 4}, {8, 4}, {16, 2}, {32, 1}, {40, 1}}) {
    EXPECT_EQ(HeadsPerRead(llama.spec, {.num_ranks = ranks}), heads) << ranks;
  }
}

TEST(CostModel, BytesThatRanksReceive) {
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  const DeviceFigures h200 = Gpu("H200");
  const LayerTraffic replicated = TrafficOf(v3, h200, {.num_ranks = 8});
  EXPECT_DOUBLE_EQ(replicated.all_reduces, 2 * 25088);
  EXPECT_DOUBLE_EQ(replicated.query_gather + replicated.partials, 0);
  const LayerTraffic striped = TrafficOf(v3, h200, {.num_ranks = 8, .num_stripes = 8});
  EXPECT_DOUBLE_EQ(striped.all_reduces, 2 * 25088);
  EXPECT_DOUBLE_EQ(striped.query_gather, 129024);
  EXPECT_DOUBLE_EQ(striped.partials, 115136);
  // A stripe group of two has 32 heads, of which each rank has half.
  const LayerTraffic pairs = TrafficOf(v3, h200, {.num_ranks = 8, .num_stripes = 2});
  EXPECT_DOUBLE_EQ(pairs.query_gather, 16 * 576 * 2);
  EXPECT_DOUBLE_EQ(pairs.partials, 16 * (512 * 2 + 4));
  const LayerTraffic dp =
      TrafficOf(v3, h200, {.num_ranks = 8, .num_stripes = 1, .dp_attention = true});
  EXPECT_DOUBLE_EQ(dp.all_reduces, 0);
  EXPECT_DOUBLE_EQ(dp.hidden_gather + dp.hidden_scatter, 25088);
  EXPECT_DOUBLE_EQ(dp.experts, 0);
  // A head of grouped queries is as wide as its key.
  const ModelCosts llama = CostsIn(SpecOf("llama-3-8b"), DType::kBFloat16);
  const LayerTraffic gqa = TrafficOf(llama, h200, {.num_ranks = 4, .num_stripes = 4});
  EXPECT_DOUBLE_EQ(gqa.query_gather, 24 * 128 * 2);
  EXPECT_DOUBLE_EQ(gqa.partials, 24 * (128 * 2 + 4));
}

struct CeilingRow {
  const char* model;
  DType weights;
  int num_ranks;
  bool kv_once;
  int64_t context;
  std::vector<double> tokens_per_second;  // at batch 1, 32, 128, 512
};

TEST(CostModel, CeilingsOnH200) {
  const std::vector<CeilingRow> rows = {
      {"deepseek-v2-lite", DType::kBFloat16, 1, true, 1024, {973, 4990, 17519, 51957}},
      {"deepseek-v2-lite", DType::kBFloat16, 1, true, 8192, {931, 4051, 9659, 15222}},
      {"deepseek-v3", DType::kFloat8E4M3, 8, true, 1024, {1046, 2818, 7340, 27562}},
      {"deepseek-v3", DType::kFloat8E4M3, 8, true, 8192, {1029, 2701, 6595, 19352}},
      {"deepseek-v3", DType::kFloat8E4M3, 8, false, 1024, {1032, 2720, 6710, 20377}},
      {"deepseek-v3", DType::kFloat8E4M3, 8, false, 8192, {931, 2116, 3937, 6493}},
      {"llama-3-8b", DType::kBFloat16, 1, true, 1024, {317, 7957, 19087, 23181}},
      {"llama-3-8b", DType::kBFloat16, 1, true, 8192, {298, 3111, 4030, 4186}},
      {"llama-2-70b", DType::kBFloat16, 8, true, 1024, {279, 8294, 27250, 38303}},
      {"llama-2-70b", DType::kBFloat16, 8, true, 8192, {274, 5502, 10218, 11458}},
      {"llama-2-70b", DType::kFloat8E4M3, 8, true, 1024, {556, 15466, 44018, 57410}},
      {"llama-2-70b", DType::kFloat8E4M3, 8, true, 8192, {538, 7948, 11921, 12725}},
  };
  const DeviceFigures h200 = Gpu("H200");
  for (const CeilingRow& row : rows) {
    const ModelCosts costs = CostsIn(SpecOf(row.model), row.weights);
    for (size_t i = 0; i < 4; ++i) {
      const int64_t batch = std::vector<int64_t>{1, 32, 128, 512}[i];
      const StepTime time =
          CeilingStep(costs, h200, row.num_ranks, row.kv_once, batch, row.context);
      EXPECT_THAT(TokensPerSecond(time, batch), IsWithin(0.01, row.tokens_per_second[i]))
          << row.model << ", context " << row.context << ", batch " << batch;
    }
  }
}

// Two all-reduces a layer at 7 us and 450 GB/s, over and above the ceiling.
TEST(CostModel, CommunicationOfTensorParallelism) {
  struct Case {
    const char* model;
    DType weights;
    std::vector<double> tokens_per_second;
  };
  const DeviceFigures h200 = Gpu("H200");
  for (const Case& one : {Case{"deepseek-v3", DType::kFloat8E4M3, {550, 2575, 6679, 22346}},
                          Case{"llama-2-70b", DType::kBFloat16, {212, 6032, 17972, 25981}}}) {
    const ModelCosts costs = CostsIn(SpecOf(one.model), one.weights);
    for (size_t i = 0; i < 4; ++i) {
      const int64_t batch = std::vector<int64_t>{1, 32, 128, 512}[i];
      StepTime time = CeilingStep(costs, h200, 8, /*kv_once=*/true, batch, 1024);
      time.communication = PredictStep(costs, h200, {.num_ranks = 8}, batch, 1024).communication;
      EXPECT_THAT(TokensPerSecond(time, batch), IsWithin(0.01, one.tokens_per_second[i]))
          << one.model << ", batch " << batch;
    }
  }
}

TEST(CostModel, PredictionsCountWhatCeilingsLeaveOut) {
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  const DeviceFigures h200 = Gpu("H200");
  const StepTime ceiling = CeilingStep(v3, h200, 8, /*kv_once=*/true, 64, 4096);
  const StepTime striped = PredictStep(v3, h200, {.num_ranks = 8, .num_stripes = 8}, 64, 4096);
  EXPECT_DOUBLE_EQ(striped.attention, ceiling.attention);
  // The projections to both latents and the routers are on every rank.
  const double mirrored = 7168 * (61.0 * (1536 + 576) + 58 * 256) * 7 / 8;
  EXPECT_THAT(striped.linear - ceiling.linear,
              IsWithin(0.01, mirrored / h200.read_bytes_per_second));
  // 2 all-reduces, a gather and an exchange a layer.
  const double bytes = 64 * (2 * 25088.0 + 129024 + 115136);
  EXPECT_THAT(striped.communication, IsWithin(1e-9, 61 * (2 * 7e-6 + 2 * 10e-6 + bytes / 450e9)));

  // One rank sends nothing, and nothing is held twice.
  const StepTime alone = PredictStep(v3, h200, {}, 64, 4096);
  const StepTime alone_at_best = CeilingStep(v3, h200, 1, /*kv_once=*/true, 64, 4096);
  EXPECT_DOUBLE_EQ(alone.total(), alone_at_best.total());
  EXPECT_DOUBLE_EQ(
      PredictStep(v3, h200, {.num_ranks = 1, .num_stripes = 1, .dp_attention = true}, 64, 4096)
          .total(),
      alone_at_best.total());
}

TEST(CostModel, WindowsBoundWhatIsRead) {
  ModelSpec spec = SpecOf("llama-3-8b");
  const DeviceFigures h200 = Gpu("H200");
  const double whole = PredictStep(CostsIn(spec, DType::kBFloat16), h200, {}, 8, 8192).attention;
  spec.windows.assign(32, 1024);
  const ModelCosts windowed = CostsIn(spec, DType::kBFloat16);
  EXPECT_NEAR(PredictStep(windowed, h200, {}, 8, 8192).attention, whole / 8, 1e-9);
  EXPECT_NEAR(PredictStep(windowed, h200, {}, 8, 512).attention, whole / 16, 1e-9);
}

TEST(CostModel, DataParallelAttention) {
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  const DeviceFigures h200 = Gpu("H200");
  const Placement dp = {.num_ranks = 8, .num_stripes = 1, .dp_attention = true};
  // Each rank attends for its own sequences, so that as many as there are ranks cost what one does.
  EXPECT_DOUBLE_EQ(PredictStep(v3, h200, dp, 1, 4096).attention,
                   PredictStep(v3, h200, dp, 8, 4096).attention);
  EXPECT_DOUBLE_EQ(2 * PredictStep(v3, h200, dp, 8, 4096).attention,
                   PredictStep(v3, h200, dp, 9, 4096).attention);
  EXPECT_DOUBLE_EQ(PredictStep(v3, h200, dp, 512, 4096).attention,
                   CeilingStep(v3, h200, 8, /*kv_once=*/true, 512, 4096).attention);
  // Attention weights are read whole by each: less is better at batch 1, all the same later on.
  EXPECT_GT(PredictStep(v3, h200, dp, 1, 4096).linear,
            1.5 * PredictStep(v3, h200, {.num_ranks = 8}, 1, 4096).linear);
}

// A token's 8 experts are on 4.6 of 7 other ranks: 16,454 bytes beat 25,088 as soon as bytes count
// more than shared experts read whole. With an expert each there is next to nothing to send.
TEST(CostModel, TokensTravelToTheirExpertsWhereThatIsFaster) {
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  const DeviceFigures h200 = Gpu("H200");
  const Placement dp = {
      .num_ranks = 8, .num_stripes = 1, .dp_attention = true, .expert_parallel = true};
  const LayerTraffic traffic = TrafficOf(v3, h200, dp);
  EXPECT_NEAR(traffic.experts, 7.0 / 8 * (1 - std::pow(7.0 / 8, 8)) * 7168 * 4, 1e-6);
  EXPECT_NEAR(traffic.hidden_gather + traffic.hidden_scatter, 25088, 1e-6);
  EXPECT_TRUE(ExchangesExperts(v3, h200, 8, 4096));
  EXPECT_TRUE(PredictStep(v3, h200, dp, 4096, 1024).all_to_all);
  EXPECT_FALSE(ExchangesExperts(v3, h200, 8, 1)) << "shared experts are read whole by each";
  DeviceFigures slow = h200;
  slow.all_to_all.latency_seconds = 1e-3;
  EXPECT_FALSE(ExchangesExperts(v3, slow, 8, 512));
  // Columns of every expert on every rank: all tokens have to come.
  Placement columns = dp;
  columns.expert_parallel = false;
  EXPECT_FALSE(PredictStep(v3, h200, columns, 4096, 1024).all_to_all);
  EXPECT_EQ(TrafficOf(v3, h200, columns).experts, 0);
}

TEST(CostModel, BatchThatIsBoundByArithmetic) {
  const DeviceFigures h200 = Gpu("H200");
  // Dense: weight bytes / bandwidth = 2 parameters x batch / peak, i.e. peak / bandwidth in bf16.
  EXPECT_NEAR(
      static_cast<double>(ComputeBoundBatch(CostsIn(SpecOf("llama-3-8b"), DType::kBFloat16), h200)),
      989.0 / 4.8, 1);
  // Experts: each of 256 meets but 8/256 of the tokens.
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  const int64_t batch = ComputeBoundBatch(v3, h200);
  const auto compute = [&](double rows) { return 2 * v3.ActiveParameters() * rows / 1979e12; };
  const auto read = [&](double rows) { return v3.ReadBytes(rows) / 4.8e12; };
  EXPECT_THAT(compute(static_cast<double>(batch)),
              IsWithin(2e-3, read(static_cast<double>(batch))));
  EXPECT_GT(batch, 3000);
  EXPECT_LT(batch, 5000);
}

TEST(CostModel, ContextsFromWhichStripesPay) {
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  const auto break_even = [&](const DeviceFigures& device, int64_t batch) {
    return BreakEvenContext(v3, device, {.num_ranks = 8, .num_stripes = 8}, {.num_ranks = 8}, batch)
        .value_or(-1);
  };
  // Queries gathered, log-sum-exps gathered and outputs reduced: three calls and 247,296 bytes.
  DeviceFigures three_calls = Gpu("H200");
  three_calls.all_to_all = {20e-6, 450e9 * 115136 / 118272};
  // Queries computed on every rank: one call.
  DeviceFigures one_call = Gpu("H200");
  one_call.all_gather = {0, 1e30};
  struct Case {
    int64_t batch;
    double three, one;
  };
  for (const Case& one :
       {Case{1, 149e3, 50e3}, {8, 21e3, 7.4e3}, {32, 7.3e3, 2.8e3}, {128, 3.8e3, 1.6e3}}) {
    EXPECT_THAT(break_even(three_calls, one.batch), IsWithin(0.02, one.three)) << one.batch;
    EXPECT_THAT(break_even(one_call, one.batch), IsWithin(0.02, one.one)) << one.batch;
  }
  // Two calls, as here, lie between.
  EXPECT_GT(break_even(Gpu("H200"), 8), 7.4e3);
  EXPECT_LT(break_even(Gpu("H200"), 8), 21e3);
  // Never worth while over a link this slow.
  DeviceFigures slow = Gpu("H200");
  slow.all_gather = slow.all_to_all = {1e6, 1};
  EXPECT_EQ(break_even(slow, 8), -1);
}

TEST(CostModel, CapacityIsWhatFitsBesideTheWeights) {
  const ModelSpec spec = SpecOf("deepseek-v2-lite");
  const std::unique_ptr<WeightSource> weights = MakeDeclaredWeights(spec);
  const auto layout = [&](int num_ranks, int num_stripes) {
    absl::StatusOr<ShardLayout> result = BuildShardLayout(spec, *weights,
                                                          {.num_ranks = num_ranks,
                                                           .num_stripes = num_stripes,
                                                           .kv_cache_dtype = DType::kBFloat16,
                                                           .page_size = 64});
    EXPECT_TRUE(result.ok()) << result.status();
    return *std::move(result);
  };
  const ShardLayout alone = layout(1, 1), replicated = layout(4, 1), striped = layout(4, 4);
  const double memory = 48 * kGiga;
  const auto expected = [&](const ShardLayout& one) {
    return static_cast<int64_t>((memory - static_cast<double>(one.MaxWeightBytes())) /
                                (31104.0 * 64)) *
           64;
  };
  EXPECT_EQ(CapacityTokens(alone, memory), expected(alone));
  EXPECT_EQ(CapacityTokens(replicated, memory), expected(replicated));
  EXPECT_EQ(CapacityTokens(striped, memory), 4 * expected(striped));
  EXPECT_EQ(CapacityTokens(alone, 20 * kGiga), 0);
  EXPECT_EQ(CapacityTokens(alone, static_cast<double>(alone.MaxWeightBytes())), 0);

  // With data-parallel attention a rank holds more weights, and pages of its own.
  const ShardLayout data_parallel = *BuildShardLayout(
      spec, *weights,
      {.num_ranks = 4, .dp_attention = true, .kv_cache_dtype = DType::kBFloat16, .page_size = 64});
  EXPECT_EQ(CapacityTokens(data_parallel, memory), 4 * expected(data_parallel));
  EXPECT_GT(data_parallel.MaxWeightBytes(), replicated.MaxWeightBytes());
  EXPECT_LT(data_parallel.MaxWeightBytes(), alone.MaxWeightBytes() / 3);
}

TEST(CostModel, WorkIsWhatTheRanksHold) {
  const DeviceFigures h200 = Gpu("H200");
  constexpr int64_t kBatch = 24, kContext = 1000;
  for (const char* model : {"deepseek-v2-lite", "llama-3-8b"}) {
    const ModelSpec spec = SpecOf(model);
    const std::unique_ptr<WeightSource> weights = MakeDeclaredWeights(spec);
    const ModelCosts costs = CostsOf(spec, *weights, DType::kBFloat16);
    for (const Placement& placement :
         {Placement{}, {.num_ranks = 4}, {.num_ranks = 6, .num_stripes = 3}, {.num_ranks = 3}}) {
      const absl::StatusOr<ShardLayout> layout =
          BuildShardLayout(spec, *weights,
                           {.num_ranks = placement.num_ranks,
                            .num_stripes = placement.num_stripes,
                            .kv_cache_dtype = DType::kBFloat16});
      ASSERT_TRUE(layout.ok()) << layout.status();
      double most = 0, all = 0;
      for (const RankLayout& rank : layout->ranks) {
        const double bytes = static_cast<double>(kBatch * kContext * rank.kv.bytes_per_token()) /
                             placement.num_stripes;
        most = std::max(most, bytes);
        all += bytes;
      }
      const StepWork work = WorkOfStep(costs, h200, placement, kBatch, kContext);
      EXPECT_DOUBLE_EQ(work.kv_bytes, most) << model;
      EXPECT_DOUBLE_EQ(work.kv_bytes_of_all, all) << model;
      EXPECT_GE(work.weight_bytes * placement.num_ranks, costs.ReadBytes(kBatch)) << model;
      EXPECT_LE(work.weight_bytes, costs.ReadBytes(kBatch)) << model;
    }
    EXPECT_DOUBLE_EQ(WorkOfStep(costs, h200, {}, kBatch, kContext).weight_bytes,
                     costs.ReadBytes(kBatch));
  }
}

TEST(CostModel, WorkCountsEveryMultiplyAdd) {
  const DeviceFigures h200 = Gpu("H200");
  const ModelCosts v3 = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  // Absorbed: 128 heads meet 512 + 64 elements of a latent for scores and 512 for the sums.
  const double attention = 61 * 4096.0 * 2 * 128 * (512 + 64 + 512);
  const StepWork alone = WorkOfStep(v3, h200, {}, 16, 4096);
  EXPECT_DOUBLE_EQ(alone.operations, 16 * (2 * v3.ActiveParameters() + attention));
  EXPECT_DOUBLE_EQ(alone.kv_bytes, 16 * 61 * 4096.0 * (512 + 64) * 2);
  // Replicated or striped, each rank computes its part of attention; what differs is what it reads.
  const StepWork replicated = WorkOfStep(v3, h200, {.num_ranks = 8}, 16, 4096);
  const StepWork striped = WorkOfStep(v3, h200, {.num_ranks = 8, .num_stripes = 8}, 16, 4096);
  EXPECT_DOUBLE_EQ(replicated.operations, striped.operations);
  EXPECT_DOUBLE_EQ(replicated.kv_bytes, alone.kv_bytes);
  EXPECT_DOUBLE_EQ(replicated.kv_bytes_of_all, 8 * alone.kv_bytes);
  EXPECT_DOUBLE_EQ(striped.kv_bytes, alone.kv_bytes / 8);
  EXPECT_DOUBLE_EQ(striped.kv_bytes_of_all, alone.kv_bytes);
  // Of whole sequences a rank reads its own, and computes what others compute together.
  const Placement dp = {.num_ranks = 8, .num_stripes = 1, .dp_attention = true};
  const StepWork dealt = WorkOfStep(v3, h200, dp, 16, 4096);
  EXPECT_DOUBLE_EQ(dealt.kv_bytes, striped.kv_bytes);
  EXPECT_DOUBLE_EQ(dealt.kv_bytes_of_all, alone.kv_bytes);
  EXPECT_DOUBLE_EQ(WorkOfStep(v3, h200, dp, 1, 4096).kv_bytes, alone.kv_bytes / 16);
}

class ChooseStripesTest : public ::testing::Test {
 protected:
  StripeChoice Choose(const ExpectedLoad& load, int64_t tokens_of_one_copy = 1 << 24) {
    std::vector<StripeOption> options;
    for (const int stripes : {1, 2, 4, 8}) {
      options.push_back({.num_stripes = stripes, .capacity_tokens = stripes * tokens_of_one_copy});
    }
    return ChooseStripes(model_, device_, 8, options, load);
  }

  ModelCosts model_ = CostsIn(SpecOf("deepseek-v3"), DType::kFloat8E4M3);
  DeviceFigures device_ = Gpu("H200");
};

TEST_F(ChooseStripesTest, FewAndShortSequencesAreReplicated) {
  const StripeChoice choice = Choose({.max_num_seqs = 1, .context_len = 1024});
  EXPECT_EQ(choice.num_stripes, 1);
  EXPECT_THAT(choice.why, HasSubstr("1 stripe for 1 sequences of 1024 tokens"));
  EXPECT_THAT(choice.why, HasSubstr(" ms with 8"));
  EXPECT_THAT(choice.why, Not(HasSubstr("holds")));
}

TEST_F(ChooseStripesTest, ManyAndLongSequencesAreStriped) {
  EXPECT_EQ(Choose({.max_num_seqs = 256, .context_len = 16384}).num_stripes, 8);
  EXPECT_EQ(Choose({.max_num_seqs = 1, .context_len = 1000000}).num_stripes, 8);
}

// The choice is that of the prediction, whatever lies between.
TEST_F(ChooseStripesTest, PicksTheLeastTime) {
  for (const int64_t batch : {1, 8, 64, 512}) {
    for (const int64_t context : {512, 4096, 16384}) {
      const int chosen = Choose({batch, context}, 1 << 28).num_stripes;
      const double best = PredictStep(model_, device_, {8, chosen, false}, batch, context).total();
      for (const int stripes : {1, 2, 4, 8}) {
        EXPECT_LE(
            best,
            kSameTime * PredictStep(model_, device_, {8, stripes, false}, batch, context).total());
      }
    }
  }
}

TEST_F(ChooseStripesTest, RoomBeatsSpeed) {
  // 64 sequences of 1,000 tokens: fastest with one copy on each rank, which would hold half.
  const ExpectedLoad load = {.max_num_seqs = 64, .context_len = 1000};
  EXPECT_EQ(Choose(load, 64000).num_stripes, 1);
  const StripeChoice choice = Choose(load, 63999);
  EXPECT_EQ(choice.num_stripes, 2);
  EXPECT_THAT(choice.why, HasSubstr("of 64000 tokens the cache holds 1 stripe 63999"));
  // Where nothing holds it all, what holds the most.
  EXPECT_EQ(Choose(load, 1000).num_stripes, 8);
}

TEST_F(ChooseStripesTest, ASlowLinkKeepsOneCopyOnEachRank) {
  device_.all_gather = device_.all_to_all = {1e-2, 1e8};
  EXPECT_EQ(Choose({.max_num_seqs = 64, .context_len = 4096}).num_stripes, 1);
}

TEST(DeviceTable, NamesWhatThereIs) {
  for (const std::string& name : DeviceNames()) {
    if (name == "cpu") continue;
    const DeviceFigures device = Gpu(name);
    EXPECT_EQ(device.name, name);
    EXPECT_FALSE(device.source.empty());
    // Of every GPU since Ampere; a slip of a power of ten would show.
    EXPECT_GT(device.memory_bytes, 40 * kGiga);
    EXPECT_GT(device.flops / device.read_bytes_per_second, 30) << name;
    EXPECT_LT(device.flops / device.read_bytes_per_second, 500) << name;
    EXPECT_TRUE(device.fp8_flops == 0 || std::abs(device.fp8_flops / device.flops - 2) < 0.03);
  }
  EXPECT_EQ(Gpu("l40s").name, "L40S");
  EXPECT_THAT(FindDevice("B9000", 1).status().message(), HasSubstr("H200, H100, A100"));
}

TEST(DeviceTable, RanksShareThisMachine) {
  const DeviceFigures alone = *FindDevice("cpu", 1);
  EXPECT_GT(alone.flops, 1e8);
  EXPECT_GT(alone.read_bytes_per_second, 1e7);
  EXPECT_GT(alone.memory_bytes, 1e6);
  EXPECT_EQ(alone.activation_bytes, 4);
  // A thousand ranks get little each, however the two measurements differ.
  const DeviceFigures many = *FindDevice("cpu", 1000);
  EXPECT_LT(many.flops, alone.flops / 10);
  EXPECT_LT(many.read_bytes_per_second, alone.read_bytes_per_second / 10);
  EXPECT_LT(many.memory_bytes, alone.memory_bytes / 10);
}

}  // namespace
}  // namespace heddle
