#include "runtime/auto_placement.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/thread_world.h"
#include "runtime/checkpoint/checkpoint.h"
#include "tests/support/engine_world.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kPageSize = 4;

EngineConfig AutoConfig(const std::string& model) {
  const absl::StatusOr<GoldenModel> golden = LoadGoldenModel(model);
  EXPECT_TRUE(golden.ok()) << golden.status();
  EngineConfig config = TestEngineConfig(golden->path);
  config.max_model_len = golden->max_model_len;
  config.block_size = kPageSize;
  config.num_stripes.reset();
  config.exchange_experts.reset();
  return config;
}

// What rank 0 logs while all ranks choose, and what each chooses.
struct Choices {
  std::vector<int64_t> of_rank;
  std::string log;
};

Choices Choose(const EngineConfig& config, int num_ranks) {
  Choices choices;
  choices.of_rank.resize(num_ranks);
  testing::internal::CaptureStderr();
  const auto world = ThreadWorld::Create({.size = num_ranks});
  const auto statuses = (*world)->Run([&](World& self) -> absl::Status {
    ASSIGN_OR_RETURN(Checkpoint checkpoint, OpenCheckpoint(config.model, config.load_format, 0));
    ASSIGN_OR_RETURN(const auto worker,
                     Worker::Create(config, checkpoint, checkpoint.spec.vocab_size, self));
    choices.of_rank[self.self.rank] = worker->limits().num_stripes;
    return absl::OkStatus();
  });
  choices.log = testing::internal::GetCapturedStderr();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  return choices;
}

TEST(AutoStripes, AllRanksChooseTheSameAndRankZeroSaysWhy) {
  for (const char* model : {"mla-lite", "gqa-odd"}) {
    const Choices choices = Choose(AutoConfig(model), 4);
    const int64_t chosen = choices.of_rank[0];
    EXPECT_THAT(chosen, AnyOf(1, 2, 4)) << model;
    EXPECT_THAT(choices.of_rank, Each(chosen)) << model;
    const std::string auto_is = "--decode-context-parallel-size auto is ";
    const size_t place = choices.log.find(auto_is);
    ASSERT_NE(place, std::string::npos) << choices.log;
    EXPECT_EQ(choices.log.find(auto_is, place + 1), std::string::npos) << "once";
    const std::string line = choices.log.substr(place, choices.log.find('\n', place) - place);
    EXPECT_THAT(line, AllOf(HasSubstr(absl::StrCat(auto_is, chosen, " stripe")),
                            HasSubstr("for 8 sequences of 64 tokens"), HasSubstr(" ms with 4"),
                            HasSubstr("a rank reads "), HasSubstr("an exchange between 4 ")));
  }
}

TEST(AutoStripes, NothingIsMeasuredWhereThereIsNoChoice) {
  EngineConfig config = AutoConfig("mla-lite");
  Choices choices = Choose(config, 1);
  EXPECT_THAT(choices.of_rank, Each(1));
  EXPECT_THAT(choices.log, Not(HasSubstr("auto is")));
  config.use_kv_cache = false;
  choices = Choose(config, 2);
  EXPECT_THAT(choices.of_rank, Each(1));
  EXPECT_THAT(choices.log, Not(HasSubstr("auto is")));
}

// Whatever was measured: a latent on every rank would leave room for a part of the load.
TEST(AutoStripes, RoomDecidesBeforeSpeed) {
  EngineConfig config = AutoConfig("mla-lite");
  config.expected_context_len = 40;  // of 8 sequences: 80 pages
  config.num_kv_pages = 20;
  Choices choices = Choose(config, 4);
  EXPECT_THAT(choices.of_rank, Each(4));
  EXPECT_THAT(choices.log, HasSubstr("of 320 tokens the cache holds 1 stripe 80, 2 stripes 160"));
  // By bytes: kv_lora_rank 16 and a RoPE key of 4, in float32, over the layers.
  config.num_kv_pages.reset();
  config.kv_cache_memory_bytes = 19 * kPageSize * 20 * 4 * 3;
  EXPECT_THAT(Choose(config, 4).of_rank, Each(4)) << "nothing holds it all, four stripes the most";
}

// What rank 0 says of how tokens meet their experts.
std::string ExchangeLine(const EngineConfig& config, int num_ranks) {
  const std::string log = Choose(config, num_ranks).log;
  const size_t end = log.find(": predicted to be faster");
  if (end == std::string::npos) return "";
  EXPECT_EQ(log.find(": predicted to be faster", end + 1), std::string::npos) << "once";
  const size_t start = log.rfind("tokens ", end);
  return log.substr(start, log.find('\n', end) - start);
}

TEST(AutoExchange, IsChosenByWhatAllRanksMeasureAndSaysSo) {
  EngineConfig config = AutoConfig("mla-v3");
  config.enable_dp_attention = true;
  config.enable_expert_parallel = true;
  EXPECT_THAT(ExchangeLine(config, 3),
              AllOf(AnyOf(HasSubstr("tokens travel to their experts"),
                          HasSubstr("tokens are gathered on every rank")),
                    HasSubstr("for 8 sequences"), HasSubstr("measured: a rank reads ")));
  EXPECT_THAT(ExchangeLine(config, 1), IsEmpty()) << "no choice";
  config.exchange_experts = true;
  EXPECT_THAT(ExchangeLine(config, 3), IsEmpty()) << "asked for";
  config.exchange_experts.reset();
  config.enable_expert_parallel = false;
  EXPECT_THAT(ExchangeLine(config, 3), IsEmpty()) << "no whole experts";
}

// Flags are checked before anything is measured.
TEST(AutoExchange, BadFlagsAreRefusedFirst) {
  EngineConfig config = AutoConfig("mla-v3");
  config.enable_dp_attention = true;
  config.enable_expert_parallel = true;
  config.max_num_seqs = 0;
  EXPECT_THAT(std::string(WithEngine(config, 2, nullptr, nullptr).message()),
              HasSubstr("--max-num-seqs: expected at least 1, found 0"));
}

TEST(AutoStripes, GivesTheTokensOfOneRank) {
  EngineConfig config = AutoConfig("mla-lite");
  config.num_kv_pages = 8;
  const Request request = GreedyRequest({5, 9, 17, 4, 8, 33, 21}, 12);
  const absl::StatusOr<EngineRun> alone = RunRequests(config, 1, {request});
  const absl::StatusOr<EngineRun> chosen = RunRequests(config, 2, {request});
  ASSERT_TRUE(alone.ok()) << alone.status();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->results[0][0].token_ids, alone->results[0][0].token_ids);
}

TEST(AutoStripes, BadConfigsAreRefusedByAllRanks) {
  EngineConfig config = AutoConfig("mla-lite");
  config.expected_context_len = (int64_t{1} << 30) + 1;
  EXPECT_THAT(std::string(WithEngine(config, 2, nullptr, nullptr).message()),
              HasSubstr("--expected-context-len 1073741825: expected at most"));
  config = AutoConfig("mla-lite");
  config.kv_cache_memory_bytes = 1;
  config.num_kv_pages.reset();
  EXPECT_THAT(std::string(WithEngine(config, 2, nullptr, nullptr).message()),
              HasSubstr("--kv-cache-memory-bytes 1: a page takes"));
  config = AutoConfig("gqa-odd");
  config.enable_expert_parallel = true;
  EXPECT_THAT(std::string(WithEngine(config, 2, nullptr, nullptr).message()),
              HasSubstr("--enable-expert-parallel"));
}

TEST(MeasureRanks, IsPositiveAndTheSameOnAllRanks) {
  std::vector<std::string> figures(3);
  const auto world = ThreadWorld::Create({.size = 3});
  const auto statuses = (*world)->Run([&](World& self) -> absl::Status {
    const auto backend = CreateCpuBackend({});
    ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
    ASSIGN_OR_RETURN(const DeviceFigures device, MeasureRanks(self, *backend, *stream));
    EXPECT_GT(device.flops, 1e6);
    EXPECT_GT(device.read_bytes_per_second, 1e6);
    EXPECT_GT(device.all_reduce.latency_seconds, 0);
    std::vector<StripeOption> options = {{.num_stripes = 1}, {.num_stripes = 3}};
    RETURN_IF_ERROR(MeasureExchanges(options, self, *backend, *stream));
    EXPECT_FALSE(options[0].exchange.has_value());
    figures[self.self.rank] = absl::StrCat(
        device.flops, " ", device.read_bytes_per_second, " ", device.all_reduce.latency_seconds,
        " ", device.all_reduce.bytes_per_second, " ", options[1].exchange->latency_seconds, " ",
        options[1].exchange->bytes_per_second);
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(figures[0], Not(IsEmpty()));
  EXPECT_THAT(figures, Each(Eq(figures[0])));
}

}  // namespace
}  // namespace heddle
