// What the pools of all ranks hold of keys, values and latents, and what a step touches of them:
// seen in the pages themselves.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/page_ledger.h"
#include "cache/page_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/thread_world.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/worker.h"
#include "tests/support/engine_world.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPageSize = 4;

EngineConfig Config(const std::string& model, int num_stripes) {
  const absl::StatusOr<GoldenModel> golden = LoadGoldenModel(model);
  EXPECT_TRUE(golden.ok()) << golden.status();
  EngineConfig config = TestEngineConfig(golden->path);
  config.max_model_len = golden->max_model_len;
  config.block_size = kPageSize;
  config.num_stripes = num_stripes;
  return config;
}

// What a rank's pool holds of some sequences.
struct CacheBytes {
  int64_t written = 0;   // of the tokens alone
  int64_t in_pages = 0;  // of the pages that hold any
  int64_t per_token = 0;
};

// Ranks whose pool was full of NaN before.
CacheBytes CountBytes(const PagePool& pool) {
  CacheBytes bytes = {.per_token = pool.layout().bytes_per_token()};
  std::vector<bool> used(pool.num_pages(), false);
  for (int64_t layer = 0; layer < pool.layout().num_layers(); ++layer) {
    for (const KvPlaneLayout& plane : pool.layout().GroupOf(layer).planes) {
      const auto* words = static_cast<const uint32_t*>(pool.Plane(layer, plane.kind).data);
      const int64_t page_words = plane.bytes_per_page / static_cast<int64_t>(sizeof(uint32_t));
      for (int64_t i = 0; i < page_words * pool.num_pages(); ++i) {
        if (words[i] == ~uint32_t{0}) continue;
        bytes.written += sizeof(uint32_t);
        used[i / page_words] = true;
      }
    }
  }
  bytes.in_pages = std::count(used.begin(), used.end(), true) * pool.layout().bytes_per_page();
  return bytes;
}

using Prompts = std::vector<std::vector<int32_t>>;

std::vector<int32_t> RandomTokens(int64_t count, std::mt19937& random) {
  std::vector<int32_t> tokens(count);
  // Within the vocabulary of every model here.
  for (int32_t& token : tokens) token = std::uniform_int_distribution<int32_t>(3, 130)(random);
  return tokens;
}

PageLedgerOptions LedgerOptions(int64_t num_stripes, int64_t pages_per_stripe) {
  PageLedgerOptions options;
  options.page_size = kPageSize;
  options.num_stripes = num_stripes;
  options.pages_per_stripe = pages_per_stripe;
  options.enable_prefix_caching = true;
  return options;
}

// Drives the worker of one rank with plans that all ranks make alike. The pool is full of NaN at
// first.
class RankDriver {
 public:
  static absl::StatusOr<RankDriver> Create(const EngineConfig& config, World& world) {
    ASSIGN_OR_RETURN(Checkpoint checkpoint, OpenCheckpoint(config.model, config.load_format, 0));
    ASSIGN_OR_RETURN(auto worker,
                     Worker::Create(config, checkpoint, checkpoint.spec.vocab_size, world));
    const auto backend = CreateCpuBackend({});
    ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
    RETURN_IF_ERROR(worker->page_pool()->Fill(0xFF, *stream));
    return RankDriver(std::move(worker));
  }

  PagePool& pool() { return *worker_->page_pool(); }
  const PageTable& table(int32_t slot) const { return ledger_->table(slot); }
  const std::vector<int32_t>& tokens(int32_t slot) const { return tokens_[slot]; }

  // Computes a prompt in one step, with room for `num_output` tokens, of which the first is sampled
  // greedily.
  absl::Status Prefill(const std::vector<int32_t>& prompt, int64_t num_output) {
    const auto slot = static_cast<int32_t>(tokens_.size());
    const auto length = static_cast<int32_t>(prompt.size());
    ASSIGN_OR_RETURN(const int64_t cached, ledger_->Admit(slot, prompt, length + num_output));
    tokens_.push_back(prompt);
    SamplingParams params;
    params.temperature = 0;
    StepPlan plan;
    plan.admissions.push_back({.batch_slot = slot,
                               .params = params,
                               .seed = 0,
                               .prompt_length = length,
                               .token_ids = prompt});
    plan.page_deltas.push_back(
        {.batch_slot = slot, .reset = true, .appended = ledger_->table(slot).pages});
    plan.rows.push_back({.batch_slot = slot,
                         .query_length = length - static_cast<int32_t>(cached),
                         .first_position = static_cast<int32_t>(cached),
                         .sample = num_output > 0});
    return Execute(std::move(plan));
  }

  // A decode step of all prompts.
  absl::Status Decode() {
    StepPlan plan;
    for (int32_t slot = 0; slot < static_cast<int32_t>(tokens_.size()); ++slot) {
      plan.rows.push_back({.batch_slot = slot,
                           .query_length = 1,
                           .first_position = static_cast<int32_t>(tokens_[slot].size()) - 1,
                           .sample = true});
    }
    return Execute(std::move(plan));
  }

 private:
  explicit RankDriver(std::unique_ptr<Worker> worker)
      : worker_(std::move(worker)),
        ledger_(std::make_unique<PageLedger>(
            LedgerOptions(worker_->limits().num_stripes, worker_->limits().num_pages))) {}

  absl::Status Execute(StepPlan plan) {
    plan.epoch = ++epoch_;
    ASSIGN_OR_RETURN(const StepResult result, worker_->Execute(plan));
    size_t next = 0;
    for (const PlanRow& row : plan.rows) {
      std::vector<int32_t>& tokens = tokens_[row.batch_slot];
      ledger_->Commit(row.batch_slot, tokens, row.first_position + row.query_length);
      if (!row.sample) continue;
      const SampledToken& sample = result.samples[next++];
      RETURN_IF_ERROR(sample.status);
      tokens.push_back(sample.token_id);
    }
    return absl::OkStatus();
  }

  std::unique_ptr<Worker> worker_;
  std::unique_ptr<PageLedger> ledger_;
  std::vector<std::vector<int32_t>> tokens_;  // of each slot
  uint64_t epoch_ = 0;
};

absl::Status OnRanks(const EngineConfig& config, int num_ranks,
                     const std::function<absl::Status(RankDriver& rank, int index)>& body) {
  ASSIGN_OR_RETURN(const auto world, ThreadWorld::Create({.size = num_ranks}));
  const auto statuses = world->Run([&](World& self) -> absl::Status {
    ASSIGN_OR_RETURN(RankDriver rank, RankDriver::Create(config, self));
    return body(rank, self.self.rank);
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

// Computes the prompts one after the other and looks into the pool of every rank.
absl::StatusOr<std::vector<CacheBytes>> BytesOfRanks(const EngineConfig& config, int num_ranks,
                                                     const Prompts& prompts) {
  std::vector<CacheBytes> bytes(num_ranks);
  const auto body = [&](RankDriver& rank, int index) -> absl::Status {
    for (const std::vector<int32_t>& prompt : prompts) {
      RETURN_IF_ERROR(rank.Prefill(prompt, /*num_output=*/0));
    }
    bytes[index] = CountBytes(rank.pool());
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(OnRanks(config, num_ranks, body));
  return bytes;
}

int64_t Sum(const std::vector<CacheBytes>& ranks, int64_t CacheBytes::*field) {
  return std::accumulate(ranks.begin(), ranks.end(), int64_t{0},
                         [&](int64_t sum, const CacheBytes& one) { return sum + one.*field; });
}

// What four ranks hold, in copies of what one rank alone holds.
struct Case {
  const char* model;
  int num_stripes;
  int64_t copies;
};

TEST(CacheContents, BytesInThePoolsOfAllRanks) {
  std::mt19937 random(5);
  Prompts prompts;
  for (const int64_t length : {1, 4, 15, 30, 33}) prompts.push_back(RandomTokens(length, random));
  const int64_t num_sequences = std::ssize(prompts);
  for (const Case& one : {Case{"mla-lite", 1, 4},
                          {"mla-lite", 2, 2},
                          {"mla-lite", 4, 1},
                          {"mqa", 1, 4},
                          {"mqa", 4, 1},
                          // Two KV heads, each on two ranks.
                          {"gqa-a", 1, 2},
                          {"gqa-a", 2, 1},
                          {"gqa-a", 4, 1}}) {
    SCOPED_TRACE(absl::StrCat(one.model, ", ", one.num_stripes, " stripes"));
    const auto alone = BytesOfRanks(Config(one.model, 1), 1, prompts);
    const auto ranks = BytesOfRanks(Config(one.model, one.num_stripes), 4, prompts);
    ASSERT_TRUE(alone.ok()) << alone.status();
    ASSERT_TRUE(ranks.ok()) << ranks.status();
    const int64_t copy = alone->front().written;
    EXPECT_EQ(copy, 83 * alone->front().per_token);
    EXPECT_EQ(Sum(*ranks, &CacheBytes::written), one.copies * copy);
    // Pages that are partly empty, at most one a sequence and copy.
    const int64_t page = kPageSize * alone->front().per_token;
    EXPECT_GE(Sum(*ranks, &CacheBytes::in_pages), one.copies * copy);
    EXPECT_LE(Sum(*ranks, &CacheBytes::in_pages), one.copies * (copy + num_sequences * page));
    // Of equal shards, no stripe has more than its part and a page.
    for (const CacheBytes& rank : *ranks) {
      EXPECT_LE(rank.written * 4, one.copies * copy + 4 * page);
    }
  }
}

// Latents over the layers take as many bytes on one rank as on many, whatever the heads.
TEST(CacheContents, BytesOfALatentDoNotDependOnTheRanks) {
  for (const int num_ranks : {1, 2, 4, 8}) {
    const auto ranks = BytesOfRanks(Config("mla-lite", 1), num_ranks, {{5, 6, 7}});
    ASSERT_TRUE(ranks.ok()) << ranks.status();
    // kv_lora_rank 16 and a RoPE key of 4, in float32; ranks without heads store nothing.
    for (const CacheBytes& rank : *ranks) {
      if (rank.written == 0) continue;
      EXPECT_EQ(rank.per_token, 20 * 4 * 3);
      EXPECT_EQ(rank.written, 3 * rank.per_token);
    }
    EXPECT_EQ(Sum(*ranks, &CacheBytes::written), std::min(num_ranks, 4) * 3 * 20 * 4 * 3);
  }
}

TEST(CacheContents, CapacityGrowsWithTheStripesAtEqualMemory) {
  // A prompt of three quarters of what four stripes hold.
  std::mt19937 random(6);
  EngineConfig config = Config("mla-lite", 1);
  config.num_kv_pages.reset();
  config.kv_cache_memory_bytes = 8 * kPageSize * 20 * 4 * 3;  // eight pages a rank
  const Request request = GreedyRequest(RandomTokens(96, random), 2);
  for (const auto& [stripes, tokens] : {std::pair(1, 32), {2, 64}, {4, 128}}) {
    config.num_stripes = stripes;
    const absl::StatusOr<EngineRun> run = RunRequests(config, 4, {request});
    if (tokens < 98) {
      EXPECT_THAT(std::string(run.status().message()),
                  HasSubstr(absl::StrCat("the cache has ", tokens, " for a sequence")));
      continue;
    }
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.total_kv_pages, 8);
    EXPECT_EQ(run->results[0][0].token_ids.size(), 2);
  }
}

TEST(CacheContents, AStripeTakesNoMoreThanItsPartOfAllThatMayRun) {
  EngineConfig config = Config("mla-lite", 1);
  config.num_kv_pages.reset();
  config.max_model_len = 63;  // and a token
  config.max_num_seqs = 3;
  for (const auto& [stripes, pages] : {std::pair(1, 48), {2, 24}, {4, 12}}) {
    config.num_stripes = stripes;
    const absl::StatusOr<EngineRun> run = RunRequests(config, 4, {GreedyRequest({5}, 1)});
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.total_kv_pages, pages) << stripes;
  }
}

// ---- What is not there

// What a pool held before, and the empty end of a page, never gets into a sum: 0 times NaN is NaN.
TEST(CacheContents, WhatPagesHeldBeforeNeverCounts) {
  std::mt19937 random(9);
  Prompts prompts;
  for (int64_t length = 1; length <= 2 * kPageSize + 1; ++length) {
    prompts.push_back(RandomTokens(length, random));
  }
  prompts.push_back(prompts.back());  // found in the prefix index
  constexpr int kOutput = 6;
  for (const char* model : {"mla-lite", "mla-v3", "gqa-odd"}) {
    EngineConfig config = Config(model, 1);
    config.max_num_seqs = std::ssize(prompts);
    config.use_kv_cache = false;
    std::vector<Request> requests;
    for (const auto& prompt : prompts) requests.push_back(GreedyRequest(prompt, kOutput));
    const absl::StatusOr<EngineRun> expected = RunRequests(config, 1, requests);
    ASSERT_TRUE(expected.ok()) << expected.status();
    config.use_kv_cache = true;
    for (const auto& [num_ranks, stripes] : {std::pair(1, 1), {2, 1}, {2, 2}}) {
      SCOPED_TRACE(absl::StrCat(model, ", ", stripes, " stripes on ", num_ranks));
      config.num_stripes = stripes;
      const absl::Status status =
          OnRanks(config, num_ranks, [&](RankDriver& rank, int index) -> absl::Status {
            for (const auto& prompt : prompts) RETURN_IF_ERROR(rank.Prefill(prompt, kOutput));
            for (int i = 1; i < kOutput; ++i) RETURN_IF_ERROR(rank.Decode());
            if (index > 0) return absl::OkStatus();
            for (size_t i = 0; i < prompts.size(); ++i) {
              const std::vector<int32_t>& tokens = rank.tokens(static_cast<int32_t>(i));
              EXPECT_EQ(std::vector<int32_t>(tokens.begin() + std::ssize(prompts[i]), tokens.end()),
                        expected->results[i][0].token_ids)
                  << prompts[i].size();
            }
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// Takes all access from the pages of the system that no page of `used` reaches into.
class OffLimits {
 public:
  OffLimits(const PagePool& pool, const std::vector<bool>& used) {
    for (int64_t layer = 0; layer < pool.layout().num_layers(); ++layer) {
      for (const KvPlaneLayout& plane : pool.layout().GroupOf(layer).planes) {
        auto* const data = static_cast<std::byte*>(pool.Plane(layer, plane.kind).data);
        for (int64_t begin = 0; begin < pool.num_pages(); ++begin) {
          if (used[begin]) continue;
          int64_t end = begin;
          while (end < pool.num_pages() && !used[end]) ++end;
          Forbid(data + begin * plane.bytes_per_page, data + end * plane.bytes_per_page);
          begin = end;
        }
      }
    }
  }
  ~OffLimits() {
    for (const auto& [data, bytes] : ranges_) mprotect(data, bytes, PROT_READ | PROT_WRITE);
  }
  OffLimits(const OffLimits&) = delete;
  OffLimits& operator=(const OffLimits&) = delete;

  int64_t num_bytes() const {
    return std::accumulate(ranges_.begin(), ranges_.end(), int64_t{0},
                           [](int64_t sum, const auto& one) { return sum + one.second; });
  }

 private:
  void Forbid(std::byte* begin, std::byte* end) {
    const auto unit = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + unit - 1) / unit * unit;
    const uintptr_t last = reinterpret_cast<uintptr_t>(end) / unit * unit;
    if (last <= first) return;
    auto* const data = reinterpret_cast<void*>(first);
    ASSERT_EQ(mprotect(data, last - first, PROT_NONE), 0);
    ranges_.emplace_back(data, last - first);
  }

  std::vector<std::pair<void*, size_t>> ranges_;
};

// The work of a step follows what lives, not how large the pool is: it would crash otherwise.
TEST(CacheContents, AStepTouchesLivePagesAlone) {
  for (const char* model : {"mla-lite", "gqa-odd"}) {
    for (const int stripes : {1, 2}) {
      EngineConfig config = Config(model, stripes);
      config.num_kv_pages = 6400;
      const absl::Status status =
          OnRanks(config, /*num_ranks=*/stripes, [&](RankDriver& rank, int index) -> absl::Status {
            RETURN_IF_ERROR(rank.Prefill({5, 6, 7, 8, 9, 10, 11, 12, 13}, 6));
            std::vector<bool> used(rank.pool().num_pages(), false);
            for (const PageLocation& page : rank.table(0).pages) {
              if (page.stripe == index) used[page.slot] = true;
            }
            const OffLimits off_limits(rank.pool(), used);
            EXPECT_GT(off_limits.num_bytes(), rank.pool().bytes() * 9 / 10);
            for (int i = 1; i < 6; ++i) RETURN_IF_ERROR(rank.Decode());
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << model << ": " << status;
    }
  }
}

// A rank with less memory than the others bounds the pools of all.
TEST(CacheContents, TheSmallestPoolIsThatOfAll) {
  for (const char* model : {"mla-lite", "gqa-a"}) {
    EngineConfig config = Config(model, 1);
    config.num_kv_pages = 24;
    EngineConfig smaller = config;
    smaller.num_kv_pages = 12;
    const auto world = ThreadWorld::Create({.size = 2});
    ASSERT_TRUE(world.ok()) << world.status();
    int64_t num_finished = 0;
    const auto statuses = (*world)->Run([&](World& self) -> absl::Status {
      if (self.self.rank != 0) return ServeRank(smaller, self);
      const auto count = [&](const RequestOutput& output) {
        if (output.finish_reason == FinishReason::kUnfinished) return;
        EXPECT_EQ(output.finish_reason, FinishReason::kLength);
        ++num_finished;
      };
      ASSIGN_OR_RETURN(const auto engine, Engine::Create(config, self, count));
      EXPECT_EQ(engine->stats().total_kv_pages, 12);
      std::mt19937 random(4);
      for (int i = 0; i < 200; ++i) {
        const int64_t length = std::uniform_int_distribution<int64_t>(1, 30)(random);
        Request request = GreedyRequest(RandomTokens(length, random), 1 + length % 7);
        request.id = absl::StrCat(i);
        RETURN_IF_ERROR(engine->Submit(std::move(request)));
      }
      return engine->Drain();  // the ledger and all tables are checked after every step
    });
    for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(num_finished, 200);
  }
}

// ---- Evenness

constexpr int64_t kStripes = 4;

// Live pages of each stripe. Those of a prefix count once.
std::vector<int64_t> LivePages(const PageLedger& ledger, const std::vector<SequenceId>& running) {
  std::vector<std::vector<bool>> live(kStripes,
                                      std::vector<bool>(ledger.options().pages_per_stripe));
  for (const SequenceId id : running) {
    for (const PageLocation& page : ledger.table(id).pages) live[page.stripe][page.slot] = true;
  }
  std::vector<int64_t> counts;
  for (const std::vector<bool>& one : live) {
    counts.push_back(std::count(one.begin(), one.end(), true));
  }
  return counts;
}

double FullestOverMean(const std::vector<int64_t>& stripes) {
  const double mean = static_cast<double>(std::accumulate(stripes.begin(), stripes.end(), 0)) /
                      static_cast<double>(stripes.size());
  return static_cast<double>(*std::max_element(stripes.begin(), stripes.end())) / mean;
}

TEST(CacheContents, ShortRequestsWithASharedPrefixFillStripesAlike) {
  std::mt19937 random(7);
  PageLedger ledger(LedgerOptions(kStripes, 300));
  const std::vector<int32_t> prefix = RandomTokens(6 * kPageSize + 1, random);
  std::vector<SequenceId> running;
  double worst = 0;
  for (SequenceId id = 0; id < 1000; ++id) {
    // From a token to three pages of its own.
    std::vector<int32_t> tokens = prefix;
    const std::vector<int32_t> own =
        RandomTokens(std::uniform_int_distribution<int64_t>(1, 3 * kPageSize)(random), random);
    tokens.insert(tokens.end(), own.begin(), own.end());
    const auto length = static_cast<int64_t>(tokens.size());
    ASSERT_TRUE(ledger.Admit(id, tokens, length + 1).ok());
    ledger.Commit(id, tokens, length);
    running.push_back(id);
    if (running.size() <= 200) continue;
    // They end in no order.
    const size_t place = std::uniform_int_distribution<size_t>(0, running.size() - 1)(random);
    ledger.Release(running[place]);
    running.erase(running.begin() + static_cast<int64_t>(place));
    worst = std::max(worst, FullestOverMean(LivePages(ledger, running)));
  }
  EXPECT_GE(worst, 1.0);
  EXPECT_LE(worst, 1.1);
}

TEST(CacheContents, RanksHoldAlikeWhatShortRequestsLeave) {
  std::mt19937 random(8);
  const std::vector<int32_t> prefix = RandomTokens(4 * kPageSize, random);
  Prompts prompts;
  for (int i = 0; i < 40; ++i) {
    prompts.push_back(prefix);
    const std::vector<int32_t> own =
        RandomTokens(std::uniform_int_distribution<int64_t>(1, 12)(random), random);
    prompts.back().insert(prompts.back().end(), own.begin(), own.end());
  }
  EngineConfig config = Config("mla-lite", kStripes);
  config.max_num_seqs = std::ssize(prompts);
  const auto ranks = BytesOfRanks(config, kStripes, prompts);
  ASSERT_TRUE(ranks.ok()) << ranks.status();
  std::vector<int64_t> pages;
  for (const CacheBytes& rank : *ranks) pages.push_back(rank.in_pages);
  EXPECT_LE(FullestOverMean(pages), 1.1);
}

}  // namespace
}  // namespace heddle
