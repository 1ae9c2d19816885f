#include "runtime/schedule/scheduler.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/runtime/schedule/driver.h"

namespace heddle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A pool of num_pages pages of 4 tokens, and room for everything else.
SchedulerOptions Options(int64_t num_pages) {
  SchedulerOptions options;
  options.max_num_seqs = 8;
  options.max_num_batched_tokens = 64;
  options.max_model_len = 64;
  options.page_table_digest = true;
  options.cache.page_size = 4;
  options.cache.pages_per_stripe = num_pages;
  return options;
}

std::vector<int32_t> Prompt(int64_t size, int32_t salt = 0) {
  std::vector<int32_t> prompt(size);
  for (int64_t i = 0; i < size; ++i) prompt[i] = static_cast<int32_t>((i * 7 + salt) % 50);
  return prompt;
}

void ExpectOutput(const Driver& driver, SequenceId id, int64_t size) {
  ASSERT_TRUE(driver.has_ended(id)) << id;
  const Job& job = driver.ended(id);
  EXPECT_TRUE(job.finished) << id;
  EXPECT_EQ(job.output, Continuation(job.prompt, job.seed, size)) << id;
}

// Tokens of each row of the last step, by sequence.
std::vector<std::pair<SequenceId, int32_t>> Rows(const Driver& driver) {
  std::vector<std::pair<SequenceId, int32_t>> rows;
  const ScheduledStep& step = driver.last_step();
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    rows.emplace_back(step.sequences[i], step.plan.rows[i].query_length);
  }
  return rows;
}

TEST(SchedulerTest, OptionsAreCheckedByName) {
  const auto error = [](auto change) {
    SchedulerOptions options = Options(8);
    change(options);
    return std::string(Scheduler::Create(options).status().message());
  };
  EXPECT_THAT(error([](auto& o) { o.max_num_seqs = 0; }), HasSubstr("max-num-seqs is 0"));
  EXPECT_THAT(error([](auto& o) { o.max_num_batched_tokens = 7; }),
              HasSubstr("max-num-batched-tokens is 7; it must be from max-num-seqs (8)"));
  EXPECT_THAT(error([](auto& o) { o.max_model_len = 0; }), HasSubstr("max-model-len is 0"));
  EXPECT_THAT(error([](auto& o) { o.prefill_chunk = -1; }), HasSubstr("prefill chunk is -1"));
  EXPECT_THAT(error([](auto& o) { o.cache.page_size = 0; }), HasSubstr("page size is 0"));
  EXPECT_EQ(error([](auto& o) {
              o.use_kv_cache = false;
              o.cache = {};
            }),
            "");
}

TEST(SchedulerTest, NothingToDoIsAnEmptyPlan) {
  Driver driver(Options(8));
  EXPECT_FALSE(driver.Step());
  ASSERT_TRUE(driver.Add(1, Prompt(3), 2).ok());
  driver.Drain();
  EXPECT_FALSE(driver.Step());
}

// One that fits max-model-len and not the pool would otherwise block everything behind it.
TEST(SchedulerTest, APromptAboveThePoolIsRefusedAtOnce) {
  Driver driver(Options(8));
  const absl::Status status = driver.Add(1, Prompt(33), 4);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("a prompt of 33 tokens needs room for 34 tokens; the KV cache has 32"));
  ASSERT_TRUE(driver.Add(2, Prompt(4), 4).ok());
  driver.Drain();
  ExpectOutput(driver, 2, 4);
  EXPECT_FALSE(driver.Add(3, Prompt(32), 4).ok()) << "no room for a token of output";
  EXPECT_TRUE(driver.Add(3, Prompt(31), 4).ok());
  driver.Drain();
}

TEST(SchedulerTest, BadPromptsAreRefusedAndHarmNobody) {
  Driver driver(Options(64));
  EXPECT_THAT(std::string(driver.Add(1, {}, 4).message()), HasSubstr("the prompt has no tokens"));
  EXPECT_THAT(std::string(driver.Add(1, Prompt(64), 4).message()),
              HasSubstr("a prompt of 64 tokens leaves no room for output; max-model-len is 64"));
  EXPECT_THAT(std::string(driver.Add(1, Prompt(65), 0).message()),
              HasSubstr("a prompt of 65 tokens is too long; max-model-len is 64"));
  ASSERT_TRUE(driver.Add(1, Prompt(4), 4).ok());
  driver.Drain();
  ExpectOutput(driver, 1, 4);
}

TEST(SchedulerTest, OutputEndsAtTheModelLength) {
  SchedulerOptions options = Options(64);
  options.max_model_len = 16;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(14), 100).ok());
  driver.Drain();
  ExpectOutput(driver, 1, 2);
}

TEST(SchedulerTest, OutputEndsAtThePoolWhateverElseRuns) {
  for (const bool company : {false, true}) {
    Driver driver(Options(8));
    ASSERT_TRUE(driver.Add(1, Prompt(10), 100).ok());
    if (company) {
      ASSERT_TRUE(driver.Add(2, Prompt(9, 3), 100).ok());
      ASSERT_TRUE(driver.Add(3, Prompt(9, 4), 5).ok());
    }
    driver.Drain();
    ExpectOutput(driver, 1, 22);
    if (company) {
      ExpectOutput(driver, 2, 23);
      ExpectOutput(driver, 3, 5);
      EXPECT_GT(driver.scheduler().num_preemptions(), 0);
    }
  }
}

TEST(SchedulerTest, ManyOverlongRequestsLeaveThePoolEmpty) {
  Driver driver(Options(8));
  for (SequenceId id = 0; id < 50; ++id) {
    ASSERT_TRUE(driver.Add(id, Prompt(5, static_cast<int32_t>(id)), 1000).ok());
  }
  driver.Drain();
  for (SequenceId id = 0; id < 50; ++id) ExpectOutput(driver, id, 27);
}

TEST(SchedulerTest, TheSmallestPoolRunsTheSmallestRequests) {
  SchedulerOptions options = Options(2);
  options.cache.page_size = 1;
  Driver driver(options);
  EXPECT_FALSE(driver.Add(1, Prompt(2), 1).ok());
  ASSERT_TRUE(driver.Add(1, Prompt(1), 9).ok());
  ASSERT_TRUE(driver.Add(2, Prompt(1, 1), 9).ok());
  driver.Drain();
  ExpectOutput(driver, 1, 1);
  ExpectOutput(driver, 2, 1);
}

// Each needs 60 % of the pool: neither may hold a part and wait for the rest.
TEST(SchedulerTest, TwoLargePromptsRunOneAfterTheOther) {
  SchedulerOptions options = Options(10);
  options.prefill_chunk = 4;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(23), 2).ok());
  ASSERT_TRUE(driver.Add(2, Prompt(23, 1), 2).ok());
  while (!driver.has_ended(1)) {
    ASSERT_TRUE(driver.Step());
    for (const auto& [id, size] : Rows(driver)) EXPECT_EQ(id, 1u);
  }
  driver.Drain();
  ExpectOutput(driver, 1, 2);
  ExpectOutput(driver, 2, 2);
  EXPECT_EQ(driver.scheduler().num_preemptions(), 0);
}

TEST(SchedulerTest, AFullPoolNeverStopsProgress) {
  SchedulerOptions options = Options(12);
  options.cache.enable_prefix_caching = true;
  Driver driver(options);
  std::mt19937_64 random(5);
  for (SequenceId id = 0; id < 200; ++id) {
    const int64_t size = 1 + static_cast<int64_t>(random() % 40);
    ASSERT_TRUE(driver
                    .Add(id, Prompt(size, static_cast<int32_t>(random() % 4)),
                         1 + static_cast<int64_t>(random() % 12), id)
                    .ok());
  }
  driver.Drain();  // each step of which must have a row
  for (SequenceId id = 0; id < 200; ++id) {
    EXPECT_EQ(driver.ended(id).output,
              Continuation(driver.ended(id).prompt, id, std::ssize(driver.ended(id).output)));
  }
  EXPECT_GT(driver.scheduler().num_preemptions(), 0);
}

TEST(SchedulerTest, EverythingQueuedStartsTogetherAsFarAsTheCapsAllow) {
  SchedulerOptions options = Options(64);
  options.max_num_seqs = 12;
  Driver driver(options);
  for (SequenceId id = 0; id < 16; ++id) ASSERT_TRUE(driver.Add(id, Prompt(4), 3).ok());
  ASSERT_TRUE(driver.Step());
  EXPECT_EQ(driver.last_step().plan.rows.size(), 12u);
  EXPECT_EQ(driver.last_step().plan.NumTokens(), 48);
  driver.Drain();
}

TEST(SchedulerTest, APromptAboveTheTokensOfAStepIsCut) {
  SchedulerOptions options = Options(64);
  options.max_num_batched_tokens = 8;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(12), 2).ok());
  ASSERT_TRUE(driver.Step());
  EXPECT_THAT(Rows(driver), ElementsAre(std::pair(1, 8)));
  ASSERT_TRUE(driver.Step());
  EXPECT_THAT(Rows(driver), ElementsAre(std::pair(1, 4)));
  driver.Drain();
  ExpectOutput(driver, 1, 2);
}

TEST(SchedulerTest, PrefillChunksAreOfTheSizeAskedFor) {
  for (const int64_t chunk : {1, 7, 64}) {
    SchedulerOptions options = Options(64);
    options.prefill_chunk = chunk;
    Driver driver(options);
    ASSERT_TRUE(driver.Add(1, Prompt(20), 3).ok());
    EXPECT_EQ(driver.Drain(), (20 + chunk - 1) / chunk + 2);
    ExpectOutput(driver, 1, 3);
  }
}

// Endless prompts and one huge one beside a sequence that decodes: it gets a token in every step.
TEST(SchedulerTest, DecodesAreInEveryStepWhateverWaits) {
  SchedulerOptions options = Options(200);
  options.max_num_batched_tokens = 16;
  options.max_model_len = 512;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(4), 100).ok());
  ASSERT_TRUE(driver.Step());
  ASSERT_TRUE(driver.Add(2, Prompt(500), 2).ok());
  SequenceId next = 3;
  for (int step = 0; step < 99; ++step) {
    ASSERT_TRUE(driver.Add(next++, Prompt(64, step), 1).ok());
    ASSERT_TRUE(driver.Step());
    EXPECT_EQ(Rows(driver).front(), std::pair(SequenceId{1}, 1));
    EXPECT_EQ(driver.last_step().plan.NumTokens(), 16) << "prompts take the rest";
  }
  ExpectOutput(driver, 1, 100);
  driver.Drain();
}

TEST(SchedulerTest, NobodyIsOvertakenWhileTheBatchIsFull) {
  SchedulerOptions options = Options(64);
  options.max_num_seqs = 1;
  Driver driver(options);
  std::vector<SequenceId> order;
  for (SequenceId id = 5; id > 0; --id) ASSERT_TRUE(driver.Add(id, Prompt(4), 2).ok());
  while (driver.Step()) {
    for (const auto& [id, size] : Rows(driver)) {
      if (order.empty() || order.back() != id) order.push_back(id);
    }
  }
  EXPECT_THAT(order, ElementsAre(5, 4, 3, 2, 1));
}

TEST(SchedulerTest, OfAPromptKnownInFullTheLastTokenIsComputed) {
  SchedulerOptions options = Options(64);
  options.cache.enable_prefix_caching = true;
  const std::vector<std::pair<int64_t, int64_t>> cases = {
      {4, 0}, {5, 4}, {7, 4}, {8, 4}, {9, 8}, {12, 8}, {13, 12}, {16, 12}, {17, 16}};
  for (const auto& [size, cached] : cases) {
    Driver driver(options);
    for (SequenceId id = 1; id <= 3; ++id) {
      ASSERT_TRUE(driver.Add(id, Prompt(size), 6).ok());
      driver.Drain();
      ExpectOutput(driver, id, 6);
      EXPECT_EQ(driver.cached_tokens(id), id == 1 ? 0 : cached) << size;
    }
  }
}

TEST(SchedulerTest, ScoringComputesThePromptWholeAndSamplesNothing) {
  SchedulerOptions options = Options(4);
  options.cache.enable_prefix_caching = true;
  options.max_num_batched_tokens = 9;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(12), 2).ok());
  driver.Drain();
  // Exactly the pool: no token follows.
  ASSERT_TRUE(driver.Add(2, Prompt(16), 0, 0, /*score=*/true).ok());
  std::vector<std::pair<int32_t, int32_t>> runs;
  while (driver.Step()) {
    for (const PlanRow& row : driver.last_step().plan.rows) {
      runs.emplace_back(row.first_position, row.query_length);
      EXPECT_FALSE(row.sample);
    }
  }
  EXPECT_THAT(runs, ElementsAre(std::pair(0, 9), std::pair(9, 7)));
  EXPECT_EQ(driver.cached_tokens(2), 0);
}

TEST(SchedulerTest, ADuplicateIdIsRefusedUntilTheFirstHasEnded) {
  Driver driver(Options(64));
  ASSERT_TRUE(driver.Add(1, Prompt(5), 4).ok());
  EXPECT_EQ(driver.Add(1, Prompt(3), 1).code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(driver.Step());
  EXPECT_EQ(driver.Add(1, Prompt(3), 1).code(), absl::StatusCode::kAlreadyExists);
  driver.Drain();
  ExpectOutput(driver, 1, 4);
  ASSERT_TRUE(driver.Add(1, Prompt(3), 2).ok());
  driver.Drain();
  ExpectOutput(driver, 1, 2);
}

TEST(SchedulerTest, AnIdThatEndsAndComesBackDuringAStepIsAnotherSequence) {
  Driver driver(Options(64));
  ASSERT_TRUE(driver.Add(1, Prompt(5), 4, 1).ok());
  ASSERT_TRUE(driver.Add(2, Prompt(6), 4, 2).ok());
  bool replaced = false;
  ASSERT_TRUE(driver.Step([&] {
    if (replaced) return;
    replaced = true;
    driver.Abort(1);
    ASSERT_TRUE(driver.Add(1, Prompt(9), 3, 3).ok());
  }));
  driver.Drain();
  EXPECT_EQ(driver.ended(1).prompt.size(), 9u);
  ExpectOutput(driver, 1, 3);
  ExpectOutput(driver, 2, 4);
}

// At every point of a request's life, with and without company: all its pages come back, once.
TEST(SchedulerTest, AbortAtEveryPointReleasesEverything) {
  for (const bool prefix : {false, true}) {
    for (int64_t at = 0; at < 60; ++at) {
      SchedulerOptions options = Options(9);
      options.prefill_chunk = 4;
      options.cache.enable_prefix_caching = prefix;
      Driver driver(options);
      ASSERT_TRUE(driver.Add(1, Prompt(20), 6, 1).ok());
      ASSERT_TRUE(driver.AddSibling(2, 1, 6, 2).ok());
      ASSERT_TRUE(driver.Add(3, Prompt(6), 6, 3).ok());
      const SequenceId victim = 1 + at % 3;
      int64_t point = 0;
      const auto abort_here = [&] {
        if (point++ == at && driver.running_or_waiting().contains(victim)) driver.Abort(victim);
      };
      abort_here();
      while (driver.Step(abort_here)) {
      }
      driver.Drain();
      for (SequenceId id = 1; id <= 3; ++id) {
        if (driver.ended(id).finished) ExpectOutput(driver, id, 6);
      }
    }
  }
}

// The younger of two is preempted with 0, 1, 2, … tokens of output: each token comes once, and is
// right.
TEST(SchedulerTest, PreemptionAtEveryStep) {
  for (const bool prefix : {false, true}) {
    std::set<int64_t> seen;
    for (int64_t num_pages = 3; num_pages < 20; ++num_pages) {
      for (int64_t first = 1; first < 12; ++first) {
        SchedulerOptions options = Options(num_pages);
        options.cache.page_size = 2;
        options.cache.enable_prefix_caching = prefix;
        options.prefill_chunk = 3;
        Driver driver(options);
        if (!driver.Add(1, Prompt(first), 16, 1).ok()) continue;
        if (!driver.Add(2, Prompt(9, 1), 14, 2).ok()) continue;
        int64_t num_preemptions = 0;
        while (!driver.running_or_waiting().empty()) {
          const int64_t size = driver.running_or_waiting().contains(2)
                                   ? std::ssize(driver.running_or_waiting().at(2).output)
                                   : 0;
          ASSERT_TRUE(driver.Step());
          if (driver.scheduler().num_preemptions() > num_preemptions) seen.insert(size);
          num_preemptions = driver.scheduler().num_preemptions();
        }
        driver.Drain();
        EXPECT_EQ(driver.ended(2).output,
                  Continuation(Prompt(9, 1), 2, std::ssize(driver.ended(2).output)));
      }
    }
    for (int64_t size = 0; size < 12; ++size) EXPECT_TRUE(seen.contains(size)) << size;
  }
}

TEST(SchedulerTest, APreemptedSequenceKeepsItsPlace) {
  SchedulerOptions options = Options(6);
  options.max_num_seqs = 2;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(8), 12).ok());
  ASSERT_TRUE(driver.Add(2, Prompt(8, 1), 12).ok());
  ASSERT_TRUE(driver.Add(3, Prompt(2, 2), 2).ok());
  std::vector<SequenceId> ended;
  int64_t preempted_while_waiting = 0;
  while (driver.Step()) {
    if (driver.scheduler().num_preemptions() > 0 && !driver.has_ended(2)) {
      preempted_while_waiting += !driver.scheduler().BatchSlot(2).has_value();
    }
    for (SequenceId id = 1; id <= 3; ++id) {
      if (driver.has_ended(id) && !std::ranges::count(ended, id)) ended.push_back(id);
    }
  }
  EXPECT_GT(preempted_while_waiting, 0);
  EXPECT_EQ(ended.front(), 1u);
  ExpectOutput(driver, 2, 12);
  ExpectOutput(driver, 3, 2);
}

// With a stripe for each sequence, as data-parallel attention has it.
TEST(SchedulerTest, PagesAreTakenFromTheNewestOnTheSameStripe) {
  SchedulerOptions options = Options(4);
  options.cache.num_stripes = 2;
  options.cache.one_stripe_per_sequence = true;
  Driver driver(options);
  EXPECT_THAT(std::string(driver.Add(1, Prompt(16), 4).message()),
              HasSubstr("needs room for 17 tokens; the KV cache has 16"));
  ASSERT_TRUE(driver.Add(1, Prompt(7), 9).ok());
  ASSERT_TRUE(driver.Add(2, Prompt(7, 1), 9).ok());
  ASSERT_TRUE(driver.Add(3, Prompt(7, 2), 9).ok());
  ASSERT_TRUE(driver.Step());
  const auto pool_of = [&](SequenceId id) { return driver.scheduler().ledger().PoolOf(id); };
  EXPECT_EQ(pool_of(1), 0);
  EXPECT_EQ(pool_of(2), 1);
  ASSERT_EQ(pool_of(3), 0);
  ASSERT_TRUE(driver.Add(4, Prompt(2, 3), 2).ok());
  ASSERT_TRUE(driver.Step());
  ASSERT_EQ(pool_of(4), 1);
  // Stripe 0 is full and stripe 1 has a page left when the first three need another.
  ASSERT_TRUE(driver.Step());
  EXPECT_EQ(driver.scheduler().num_preemptions(), 1);
  EXPECT_FALSE(driver.scheduler().BatchSlot(3).has_value()) << "not 4, which is newer, on stripe 1";
  EXPECT_TRUE(driver.has_ended(4));
  driver.Drain();
  for (SequenceId id = 1; id <= 3; ++id) ExpectOutput(driver, id, 9);
  ExpectOutput(driver, 4, 2);
}

TEST(SchedulerTest, NobodyOvertakesOneWhoseStripesAreFull) {
  SchedulerOptions options = Options(4);
  options.cache.num_stripes = 2;
  options.cache.one_stripe_per_sequence = true;
  Driver driver(options);
  for (SequenceId id = 1; id <= 2; ++id) {
    ASSERT_TRUE(driver.Add(id, Prompt(9, static_cast<int32_t>(id)), 3).ok());  // 3 of 4 pages
  }
  ASSERT_TRUE(driver.Add(3, Prompt(5, 3), 2).ok());
  ASSERT_TRUE(driver.Add(4, Prompt(2, 4), 2).ok());
  ASSERT_TRUE(driver.Step());
  EXPECT_THAT(Rows(driver), ElementsAre(std::pair(1, 9), std::pair(2, 9)));
  driver.Drain();
  for (SequenceId id = 1; id <= 2; ++id) ExpectOutput(driver, id, 3);
  for (SequenceId id = 3; id <= 4; ++id) ExpectOutput(driver, id, 2);
  EXPECT_EQ(driver.scheduler().num_preemptions(), 0);
}

TEST(SchedulerTest, SiblingsShareThePromptAndGoTheirOwnWays) {
  for (const bool prefix : {false, true}) {
    for (const int64_t size : {1, 2, 4, 5, 8, 9, 15}) {
      SchedulerOptions options = Options(40);
      options.prefill_chunk = 4;
      options.cache.enable_prefix_caching = prefix;
      Driver driver(options);
      ASSERT_TRUE(driver.Add(1, Prompt(size), 7, 1).ok());
      for (SequenceId id = 2; id <= 4; ++id) {
        ASSERT_TRUE(driver.AddSibling(id, 1, 7, id).ok());
      }
      int64_t num_tokens = 0;
      while (driver.Step()) num_tokens += driver.last_step().plan.NumTokens();
      // The prompt once, the last prompt token of each sibling, and the outputs but the last.
      EXPECT_EQ(num_tokens, size + 3 + 4 * 6) << size;
      for (SequenceId id = 1; id <= 4; ++id) ExpectOutput(driver, id, 7);
      for (SequenceId id = 2; id <= 4; ++id) EXPECT_EQ(driver.cached_tokens(id), size - 1);
      driver.Drain();
    }
  }
}

TEST(SchedulerTest, SiblingsOutliveAParentThatWasAbortedBeforeTheyShared) {
  for (int64_t steps = 0; steps < 5; ++steps) {
    SchedulerOptions options = Options(40);
    options.prefill_chunk = 4;
    Driver driver(options);
    ASSERT_TRUE(driver.Add(1, Prompt(15), 7, 1).ok());
    ASSERT_TRUE(driver.AddSibling(2, 1, 7, 2).ok());
    ASSERT_TRUE(driver.AddSibling(3, 2, 7, 3).ok());
    for (int64_t step = 0; step < steps; ++step) ASSERT_TRUE(driver.Step());
    driver.Abort(1);
    // The id of the parent in another's hands is not their parent.
    ASSERT_TRUE(driver.Add(1, Prompt(20, 9), 3, 4).ok());
    driver.Drain();
    for (SequenceId id = 2; id <= 3; ++id) ExpectOutput(driver, id, 7);
    ExpectOutput(driver, 1, 3);
  }
}

TEST(SchedulerTest, OthersStartWhileASiblingWaitsForItsPrompt) {
  SchedulerOptions options = Options(40);
  options.prefill_chunk = 2;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(9), 2).ok());
  ASSERT_TRUE(driver.AddSibling(2, 1, 2, 5).ok());
  ASSERT_TRUE(driver.Add(3, Prompt(6, 1), 2).ok());
  ASSERT_TRUE(driver.Step());
  EXPECT_THAT(Rows(driver), ElementsAre(std::pair(1, 2), std::pair(3, 2)));
  driver.Drain();
  for (SequenceId id = 1; id <= 3; ++id) ExpectOutput(driver, id, 2);
}

TEST(SchedulerTest, ASiblingNeedsAParentThatIsThere) {
  Driver driver(Options(8));
  EXPECT_THAT(std::string(driver.AddSibling(2, 1, 1, 0).message()),
              HasSubstr("sequence 1 is neither waiting nor running"));
  ASSERT_TRUE(driver.Add(1, Prompt(4), 1).ok());
  EXPECT_EQ(driver.AddSibling(1, 1, 1, 0).code(), absl::StatusCode::kAlreadyExists);
  driver.Drain();
}

// Long past the pool: pages are let go as the window passes them, in the prompt and in the output.
TEST(SchedulerTest, AWindowRunsPromptsLongerThanThePool) {
  for (const bool prefix : {false, true}) {
    SchedulerOptions options = Options(4);
    options.max_model_len = 400;
    options.cache.window = 7;
    options.cache.enable_prefix_caching = prefix;
    Driver driver(options);
    for (SequenceId id = 1; id <= 3; ++id) ASSERT_TRUE(driver.Add(id, Prompt(150), 100).ok());
    driver.Drain();
    for (SequenceId id = 1; id <= 3; ++id) ExpectOutput(driver, id, 100);
  }
}

TEST(SchedulerTest, APoolSmallerThanTheWindowEndsSequencesAtThePool) {
  SchedulerOptions options = Options(3);
  options.cache.window = 40;
  Driver driver(options);
  ASSERT_TRUE(driver.Add(1, Prompt(5), 100).ok());
  ASSERT_TRUE(driver.Add(2, Prompt(6), 100).ok());
  driver.Drain();
  ExpectOutput(driver, 1, 7);
  ExpectOutput(driver, 2, 6);
}

TEST(SchedulerTest, WithoutACacheEveryStepComputesEverySequenceWhole) {
  SchedulerOptions options = Options(1);
  options.use_kv_cache = false;
  options.prefill_chunk = 3;
  options.max_num_batched_tokens = 24;
  Driver driver(options);
  EXPECT_THAT(std::string(driver.Add(9, Prompt(24), 1).message()),
              HasSubstr("needs room for 25 tokens; a step without a KV cache has 24"));
  ASSERT_TRUE(driver.Add(1, Prompt(6), 100).ok());
  ASSERT_TRUE(driver.Add(2, Prompt(7), 8).ok());
  ASSERT_TRUE(driver.AddSibling(3, 2, 4, 6).ok());
  ASSERT_TRUE(driver.Step());
  EXPECT_THAT(Rows(driver), ElementsAre(std::pair(1, 6), std::pair(2, 7), std::pair(3, 7)));
  while (driver.Step()) {
    EXPECT_TRUE(driver.last_step().plan.page_deltas.empty());
    for (const PlanRow& row : driver.last_step().plan.rows) EXPECT_TRUE(row.sample);
  }
  ExpectOutput(driver, 1, 18);
  ExpectOutput(driver, 2, 8);
  ExpectOutput(driver, 3, 4);
  EXPECT_GT(driver.scheduler().num_preemptions(), 0);
}

TEST(SchedulerTest, LessThanFourPercentOfTheCacheIsWasted) {
  SchedulerOptions options = Options(0);
  options.max_num_seqs = 64;
  options.max_num_batched_tokens = 2048;
  options.max_model_len = 2048;
  options.cache.page_size = 16;
  options.cache.pages_per_stripe = 2500;
  auto scheduler = *Scheduler::Create(options);
  std::mt19937_64 random(17);
  std::vector<int64_t> num_left(256);
  for (SequenceId id = 0; id < 256; ++id) {
    num_left[id] = 64 + static_cast<int64_t>(random() % 193);
    const int64_t size = 64 + static_cast<int64_t>(random() % 961);
    ASSERT_TRUE(scheduler->Add(id, Prompt(size, static_cast<int32_t>(id)), {}, id).ok());
  }
  double sum = 0.0;
  int64_t num_steps = 0;
  for (ScheduledStep step = scheduler->Plan(); !step.empty(); step = scheduler->Plan()) {
    scheduler->Commit(step);
    sum += scheduler->ledger().Waste();
    ++num_steps;
    for (size_t i = 0; i < step.sequences.size(); ++i) {
      if (!step.plan.rows[i].sample) continue;
      scheduler->Append(step.sequences[i], 1);
      if (--num_left[step.sequences[i]] == 0) scheduler->Finish(step.sequences[i]);
    }
  }
  const double mean = sum / static_cast<double>(num_steps);
  EXPECT_GT(mean, 0.0);
  EXPECT_LT(mean, 0.04);
}

}  // namespace
}  // namespace heddle
