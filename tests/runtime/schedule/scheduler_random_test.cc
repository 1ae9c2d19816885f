// Random requests, aborts and forks over random shapes: every token as the model says, every page
// released.
#include <algorithm>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/schedule/scheduler.h"
#include "tests/runtime/schedule/driver.h"

namespace heddle {
namespace {

// What the episodes reached, so that the test cannot pass by doing nothing.
struct Reach {
  int64_t num_operations = 0;  // submissions, aborts and steps that ran
  int64_t num_preemptions = 0;
  int64_t num_copies = 0;         // of a fork's partial page
  int64_t num_dropped_pages = 0;  // left a window
};

class Episode {
 public:
  Episode(uint64_t seed, Reach& reach)
      : random_(seed), options_(RandomOptions()), driver_(options_), reach_(reach) {}

  void Run() {
    SCOPED_TRACE(testing::Message()
                 << "seqs " << options_.max_num_seqs << " tokens "
                 << options_.max_num_batched_tokens << " model " << options_.max_model_len
                 << " chunk " << options_.prefill_chunk << " cache " << options_.use_kv_cache
                 << " page " << options_.cache.page_size << " stripes "
                 << options_.cache.num_stripes << " one each "
                 << options_.cache.one_stripe_per_sequence << " pages "
                 << options_.cache.pages_per_stripe << " window " << options_.cache.window
                 << " prefix " << options_.cache.enable_prefix_caching);
    for (int round = 0; round < 150 && !testing::Test::HasFailure(); ++round) {
      if (Below(3) == 0 || driver_.running_or_waiting().empty()) {
        Disturb();
      } else {
        Step();
      }
      driver_.CheckIntegrity();
    }
    disturb_ = false;
    while (!testing::Test::HasFailure() && !driver_.running_or_waiting().empty()) Step();
    driver_.Drain();
    reach_.num_preemptions += driver_.scheduler().num_preemptions();
  }

 private:
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  template <typename T>
  T OneOf(std::initializer_list<T> choices) {
    return choices.begin()[Below(std::ssize(choices))];
  }

  SchedulerOptions RandomOptions() {
    SchedulerOptions options;
    options.max_num_seqs = 1 + Below(10);
    options.max_num_batched_tokens = options.max_num_seqs + Below(24);
    options.max_model_len = 2 + Below(40);
    options.prefill_chunk = OneOf<int64_t>({0, 0, 1, 7, 64});
    options.use_kv_cache = Below(8) > 0;
    options.page_table_digest = Below(4) > 0;
    options.cache.page_size = OneOf<int64_t>({1, 2, 3, 4, 16});
    options.cache.num_stripes = 1 + Below(3);
    options.cache.one_stripe_per_sequence = Below(3) == 0;
    // From less than one sequence may need to enough for several.
    const int64_t num_tokens = options.max_model_len * OneOf<int64_t>({1, 2, 3, 5, 10}) / 2;
    options.cache.pages_per_stripe =
        1 + num_tokens / (options.cache.page_size * options.cache.num_stripes);
    options.cache.window = OneOf<int64_t>({0, 0, 2, 3, 7, 16});
    options.cache.enable_prefix_caching = Below(3) > 0;
    return options;
  }

  void Step() {
    ++reach_.num_operations;
    ASSERT_TRUE(driver_.Step([&] {
      if (disturb_ && Below(16) == 0) Disturb();
    }));
    const StepPlan& plan = driver_.last_step().plan;
    reach_.num_copies += std::ssize(plan.page_ops);
    for (const PageTableDelta& delta : plan.page_deltas) {
      reach_.num_dropped_pages += delta.reset ? 0 : delta.num_dropped_front;
    }
  }

  SequenceId AnyId() { return static_cast<SequenceId>(Below(24)); }

  // Something the engine's users do while it runs.
  void Disturb() {
    ++reach_.num_operations;
    const int64_t kind = Below(10);
    if (kind < 6) {
      const int64_t longest = Below(8) == 0 ? options_.max_model_len : options_.max_model_len / 2;
      std::vector<int32_t> prompt(Below(longest + 1));
      const int64_t alike = Below(2 * options_.cache.page_size + 1);
      for (int64_t i = 0; i < std::ssize(prompt); ++i) {
        prompt[i] = i < alike ? 0 : static_cast<int32_t>(Below(kFakeVocabSize));
      }
      // Duplicate ids and prompts that cannot be run are refused.
      const SequenceId id = AnyId();
      const int64_t size = std::ssize(prompt);
      const int64_t max_tokens = Below(8) == 0 ? 0 : 1 + Below(30);
      const int64_t needed = size + (max_tokens > 0 ? 1 : 0);
      const bool is_new = !driver_.running_or_waiting().contains(id);
      const absl::Status status =
          driver_.Add(id, std::move(prompt), max_tokens, random_(), Below(6) == 0);
      EXPECT_EQ(status.ok(), is_new && size > 0 && needed <= MaxSequenceTokens()) << status;
      for (int64_t n = Below(4); n > 0 && max_tokens > 0; --n) AddSibling(id);
    } else if (kind < 9) {
      AddSibling(AnyId());
    } else if (!driver_.running_or_waiting().empty()) {
      auto victim = driver_.running_or_waiting().begin();
      std::advance(victim, Below(std::ssize(driver_.running_or_waiting())));
      driver_.Abort(victim->first);
    }
  }

  void AddSibling(SequenceId parent) {
    const SequenceId id = AnyId();
    const auto source = driver_.running_or_waiting().find(parent);
    const bool legal =
        source != driver_.running_or_waiting().end() && !driver_.running_or_waiting().contains(id);
    // Where the parent only scores, its prompt may leave no room for output.
    const int64_t max_tokens = legal && source->second.max_tokens == 0 ? 0 : 1 + Below(30);
    const absl::Status status = driver_.AddSibling(id, parent, max_tokens, random_());
    EXPECT_EQ(status.ok(), legal) << status;
  }

  // Worked out apart from the ledger: a window always fits where all that any token sees does.
  int64_t MaxSequenceTokens() const {
    if (!options_.use_kv_cache) {
      return std::min(options_.max_model_len, options_.max_num_batched_tokens);
    }
    const int64_t page_size = options_.cache.page_size;
    const int64_t num_pages =
        options_.cache.pages_per_stripe *
        (options_.cache.one_stripe_per_sequence ? 1 : options_.cache.num_stripes);
    int64_t num_tokens = num_pages * page_size;
    if (options_.cache.window > 0) {
      int64_t most = 0;
      for (int64_t last = 0; last < 200; ++last) {
        const int64_t first = std::max<int64_t>(0, last - options_.cache.window + 1);
        most = std::max(most, last / page_size - first / page_size + 1);
      }
      if (most <= num_pages) num_tokens = options_.max_model_len;
    }
    return std::min(options_.max_model_len, num_tokens);
  }

  std::mt19937_64 random_;
  const SchedulerOptions options_;
  Driver driver_;
  Reach& reach_;
  bool disturb_ = true;
};

TEST(SchedulerRandomTest, EveryTokenAsTheModelSaysAndEveryPageReleased) {
  Reach reach;
  for (uint64_t seed = 1; reach.num_operations < 150'000 && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Episode(seed, reach).Run();
  }
  EXPECT_GT(reach.num_preemptions, 3000);
  EXPECT_GT(reach.num_copies, 1000);
  EXPECT_GT(reach.num_dropped_pages, 10'000);
}

}  // namespace
}  // namespace heddle
