// Drives the ledger with random operations against a model that knows every page's contents.
#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cache/page_ledger.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using Prefix = std::pair<std::string, std::vector<int32_t>>;  // salt, all tokens up to a page's end
// Stands for all tokens of a sequence up to a position.
uint64_t Fold(uint64_t history, int32_t token) {
  history = (history ^ (static_cast<uint64_t>(token) + 1)) * 0x9E3779B97F4A7C15;
  return history ^ (history >> 29);
}
using PageKey = std::pair<int32_t, int32_t>;  // stripe, slot

PageKey KeyOf(PageLocation location) { return {location.stripe, location.slot}; }

// A naive ledger: contents instead of counts, and whole prefixes instead of hashes. It follows the
// pages that the ledger hands out, checks that each was allowed, and predicts everything else.
class Shadow {
 public:
  explicit Shadow(const PageLedgerOptions& options) : options_(options), ledger_(options) {
    for (int32_t stripe = 0; stripe < options.num_stripes; ++stripe) {
      for (int32_t slot = 0; slot < options.pages_per_stripe; ++slot) pages_[{stripe, slot}] = {};
    }
    evictable_.resize(options.num_stripes);
  }

  void Admit(SequenceId id, std::vector<int32_t> tokens, int64_t num_tokens, bool reuse,
             const std::string& salt) {
    const auto result = ledger_.Admit(id, tokens, num_tokens, {.reuse = reuse, .salt = salt});
    if (sequences_.contains(id)) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kAlreadyExists);
      return;
    }
    Sequence sequence;
    sequence.salt = salt;
    sequence.tokens = std::move(tokens);
    const bool looks_up = options_.enable_prefix_caching && reuse;
    const bool fits = Start(sequence, num_tokens, looks_up) ||
                      (options_.one_stripe_per_sequence && Start(sequence, num_tokens, false));
    if (!fits) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted) << result.status();
      return;
    }
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(*result, sequence.committed);
    EXPECT_EQ(ledger_.PoolOf(id), sequence.home);
    FollowGrowth(id, sequence);
    EXPECT_EQ(sequence.end(), StartEnd(sequence.first, num_tokens));
    sequences_.emplace(id, std::move(sequence));
  }

  void Fork(SequenceId parent, SequenceId child, int64_t num_shared, int64_t num_tokens) {
    const auto result = ledger_.Fork(parent, child, num_shared, num_tokens);
    if (sequences_.contains(child)) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kAlreadyExists);
      return;
    }
    const Sequence& source = sequences_.at(parent);
    Sequence sequence;
    sequence.salt = source.salt;
    sequence.home = source.home;
    sequence.committed = num_shared;
    sequence.tokens.assign(source.tokens.begin(), source.tokens.begin() + num_shared);
    sequence.first = FirstVisible(num_shared);
    if (sequence.first < source.first) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
      return;
    }
    const int64_t num_whole = num_shared / options_.page_size;
    const bool partial = num_shared % options_.page_size > 0;
    const int64_t needed = StartEnd(sequence.first, num_tokens) - num_whole;
    const PageKey tail = partial ? source.pages[num_whole - source.first] : PageKey{};
    if (needed > NumAvailableTo(sequence.home) || (partial && NumAvailable(tail.first) == 0)) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted) << result.status();
      return;
    }
    ASSERT_TRUE(result.ok()) << result.status();
    for (int64_t page = sequence.first; page < num_whole; ++page) {
      sequence.pages.push_back(source.pages[page - source.first]);
      Hold(sequence.pages.back());
    }
    ASSERT_EQ(result->has_value(), partial);
    if (partial) {
      EXPECT_EQ(KeyOf((*result)->source), tail);
      const PageKey target = KeyOf((*result)->target);
      EXPECT_EQ(target.first, tail.first) << "the copy must stay on its stripe";
      Take(target);
      const std::vector<uint64_t>& from = pages_[tail].contents;
      pages_[target].contents.assign(from.begin(), from.begin() + num_shared % options_.page_size);
      sequence.pages.push_back(target);
    }
    FollowGrowth(child, sequence);
    sequences_.emplace(child, std::move(sequence));
  }

  void Reserve(SequenceId id, int64_t num_tokens) {
    Sequence& sequence = sequences_.at(id);
    const int64_t end = (num_tokens + options_.page_size - 1) / options_.page_size;
    const bool fits = end - sequence.end() <= NumAvailableTo(sequence.home);
    EXPECT_EQ(ledger_.ReservableTokens(id) >= num_tokens, fits);
    EXPECT_EQ(ledger_.Reserve(id, num_tokens), fits);
    FollowGrowth(id, sequence);
    EXPECT_TRUE(!fits || sequence.end() >= end);
  }

  // Computes up to num_computed of the sequence's tokens, of which unknown ones are drawn.
  void Commit(SequenceId id, int64_t num_computed, std::mt19937_64& random) {
    Sequence& sequence = sequences_.at(id);
    num_computed = std::min(num_computed, sequence.end() * options_.page_size);
    while (sequence.size() < num_computed) sequence.tokens.push_back(random() % 2);
    uint64_t history = 0;
    for (int64_t position = 0; position < num_computed; ++position) {
      history = Fold(history, sequence.tokens[position]);
      if (position < sequence.committed) continue;
      Page& page = pages_[sequence.pages[position / options_.page_size - sequence.first]];
      ASSERT_EQ(page.holders, 1) << "a shared page is written";
      page.contents.resize(position % options_.page_size);
      page.contents.push_back(history);
    }
    ledger_.Commit(id, sequence.tokens, num_computed);
    const int64_t from = sequence.committed / options_.page_size;
    sequence.committed = num_computed;
    for (int64_t page = from; page < num_computed / options_.page_size; ++page) {
      if (!options_.enable_prefix_caching) break;
      const PageKey key = sequence.pages[page - sequence.first];
      if (index_.emplace(PrefixOf(sequence, page), key).second) {
        pages_[key].indexed = PrefixOf(sequence, page);
      }
    }
    while (sequence.first < FirstVisible(num_computed)) {
      LetGo(sequence.pages.front());
      sequence.pages.erase(sequence.pages.begin());
      ++sequence.first;
    }
  }

  void Release(SequenceId id) {
    ledger_.Release(id);
    LetGoFromEnd(sequences_.at(id));
    sequences_.erase(id);
  }

  void CheckAll() {
    const absl::Status integrity = ledger_.CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity;
    ASSERT_EQ(ledger_.num_available_pages(), NumAvailable());
    int64_t num_filled = 0;
    int64_t num_slots = 0;
    for (const auto& [key, page] : pages_) {
      if (page.holders == 0 || page.contents.empty()) continue;
      num_filled += static_cast<int64_t>(page.contents.size());
      num_slots += options_.page_size;
    }
    const double waste =
        num_slots == 0 ? 0.0 : static_cast<double>(num_slots - num_filled) / num_slots;
    ASSERT_NEAR(ledger_.Waste(), waste, 1e-12);
    for (const auto& [id, sequence] : sequences_) {
      const PageTable& table = ledger_.table(id);
      ASSERT_EQ(table.first_page, sequence.first);
      ASSERT_EQ(table.end_page(), sequence.end());
      for (size_t i = 0; i < sequence.pages.size(); ++i) {
        ASSERT_EQ(KeyOf(table.pages[i]), sequence.pages[i]);
      }
      // Every position that the next token sees is there, with exactly this sequence's history.
      const int64_t oldest =
          options_.window == 0 ? 0 : std::max<int64_t>(0, sequence.committed - options_.window + 1);
      uint64_t history = 0;
      for (int64_t position = 0; position < sequence.committed; ++position) {
        history = Fold(history, sequence.tokens[position]);
        if (position < oldest) continue;
        const int64_t entry = position / options_.page_size - sequence.first;
        ASSERT_GE(entry, 0);
        const Page& page = pages_[sequence.pages[entry]];
        ASSERT_LT(position % options_.page_size, static_cast<int64_t>(page.contents.size()));
        ASSERT_EQ(page.contents[position % options_.page_size], history);
      }
    }
  }

  // All of these are legal arguments of Fork and Commit.
  std::vector<SequenceId> ids() const {
    std::vector<SequenceId> ids;
    for (const auto& [id, sequence] : sequences_) ids.push_back(id);
    return ids;
  }
  int64_t committed(SequenceId id) const { return sequences_.at(id).committed; }
  int64_t end_tokens(SequenceId id) const { return sequences_.at(id).end() * options_.page_size; }
  const PageLedger& ledger() const { return ledger_; }
  int64_t num_evicted() const { return num_evicted_; }

 private:
  struct Page {
    int64_t holders = 0;
    std::vector<uint64_t> contents;  // per slot: the fold of all tokens up to that position
    std::optional<Prefix> indexed;
  };
  struct Sequence {
    std::string salt;
    std::vector<int32_t> tokens;
    int64_t committed = 0;
    int64_t first = 0;  // page
    int32_t home = 0;   // stripe, if it has one
    std::vector<PageKey> pages;
    int64_t end() const { return first + static_cast<int64_t>(pages.size()); }
    int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  };

  // Holds what a sequence shares of a known prefix, if it looks, and says whether the rest fits; if
  // not, lets go again: those pages were last used now.
  bool Start(Sequence& sequence, int64_t num_tokens, bool looks_up) {
    sequence.committed = looks_up ? LongestHit(sequence.salt, sequence.tokens) : 0;
    sequence.first = FirstVisible(sequence.committed);
    sequence.pages.clear();
    for (int64_t page = sequence.first; page < sequence.committed / options_.page_size; ++page) {
      sequence.pages.push_back(index_.at(PrefixOf(sequence, page)));
      Hold(sequence.pages.back());
    }
    if (options_.one_stripe_per_sequence) {
      sequence.home = sequence.pages.empty() ? EmptiestStripe() : sequence.pages.front().first;
    }
    const int64_t needed = StartEnd(sequence.first, num_tokens) - sequence.end();
    if (needed <= NumAvailableTo(sequence.home)) return true;
    LetGoFromEnd(sequence);
    return false;
  }
  Prefix PrefixOf(const Sequence& sequence, int64_t page) const {
    const auto begin = sequence.tokens.begin();
    return {sequence.salt, {begin, begin + (page + 1) * options_.page_size}};
  }
  int64_t FirstVisible(int64_t position) const {
    if (options_.window == 0) return 0;
    return std::max<int64_t>(0, position - (options_.window - 1)) / options_.page_size;
  }
  // With a window, what a start reserves is capped by the most pages that one token can touch.
  int64_t StartEnd(int64_t first, int64_t num_tokens) const {
    const int64_t end = (num_tokens + options_.page_size - 1) / options_.page_size;
    if (options_.window == 0) return end;
    int64_t most = 0;
    for (int64_t position = 0; position < 3 * (options_.window + options_.page_size); ++position) {
      most = std::max(most, position / options_.page_size - FirstVisible(position) + 1);
    }
    return std::min(end, first + most);
  }
  int64_t LongestHit(const std::string& salt, const std::vector<int32_t>& tokens) const {
    const int64_t page_size = options_.page_size;
    const int64_t size = static_cast<int64_t>(tokens.size());
    for (int64_t hit = (size - 1) / page_size; hit > 0; --hit) {
      bool all = true;
      std::set<int32_t> stripes;
      for (int64_t page = FirstVisible(hit * page_size); page < hit && all; ++page) {
        const std::vector<int32_t> prefix(tokens.begin(), tokens.begin() + (page + 1) * page_size);
        const auto known = index_.find({salt, prefix});
        all = known != index_.end();
        if (all) stripes.insert(known->second.first);
      }
      all = all && (!options_.one_stripe_per_sequence || stripes.size() <= 1);
      // A hit of no pages needs somebody to know that the prefix was there at all.
      if (FirstVisible(hit * page_size) == hit) all = Known(salt, tokens, hit * page_size);
      if (all) return hit * page_size;
    }
    return 0;
  }
  // With a window of one token no page is needed: the ledger still wants its node in the tree,
  // which lives while a later page or a sequence that passed there does.
  bool Known(const std::string& salt, const std::vector<int32_t>& tokens, int64_t size) const {
    const auto starts = [&](const std::vector<int32_t>& other, int64_t limit) {
      return limit >= size && std::equal(tokens.begin(), tokens.begin() + size, other.begin());
    };
    for (const auto& [prefix, page] : index_) {
      if (prefix.first == salt && starts(prefix.second, std::ssize(prefix.second))) return true;
    }
    for (const auto& [id, sequence] : sequences_) {
      if (sequence.salt == salt && starts(sequence.tokens, sequence.committed)) return true;
    }
    return false;
  }

  int64_t NumAvailable(int32_t stripe) const {
    return std::ranges::count_if(pages_, [&](const auto& entry) {
      return entry.first.first == stripe && entry.second.holders == 0;
    });
  }
  int64_t NumAvailable() const {
    int64_t sum = 0;
    for (int32_t stripe = 0; stripe < options_.num_stripes; ++stripe) sum += NumAvailable(stripe);
    return sum;
  }
  int64_t NumAvailableTo(int32_t home) const {
    return options_.one_stripe_per_sequence ? NumAvailable(home) : NumAvailable();
  }
  int32_t EmptiestStripe() const {
    int32_t best = 0;
    for (int32_t stripe = 1; stripe < options_.num_stripes; ++stripe) {
      if (NumAvailable(stripe) > NumAvailable(best)) best = stripe;
    }
    return best;
  }
  void Hold(PageKey key) {
    if (++pages_[key].holders == 1) std::erase(evictable_[key.first], key);
  }
  void LetGo(PageKey key) {
    Page& page = pages_[key];
    if (--page.holders > 0) return;
    if (page.indexed) {
      evictable_[key.first].push_back(key);
    } else {
      page.contents.clear();
    }
  }
  void LetGoFromEnd(const Sequence& sequence) {
    for (auto page = sequence.pages.rbegin(); page != sequence.pages.rend(); ++page) LetGo(*page);
  }
  // The ledger took this page for new contents: it was free, or the oldest evictable one of its
  // stripe when none was free.
  void Take(PageKey key) {
    Page& page = pages_[key];
    ASSERT_EQ(page.holders, 0) << "a live page is handed out again";
    if (page.indexed) {
      const bool any_free = std::ranges::any_of(pages_, [&](const auto& entry) {
        return entry.first.first == key.first && entry.second.holders == 0 && !entry.second.indexed;
      });
      EXPECT_FALSE(any_free) << "evicts although a page is free";
      ASSERT_EQ(evictable_[key.first].front(), key) << "evicts another than the oldest";
      evictable_[key.first].erase(evictable_[key.first].begin());
      index_.erase(*page.indexed);
      ++num_evicted_;
    }
    page = Page{.holders = 1, .contents = {}, .indexed = {}};
  }
  // Takes over the pages that the ledger has appended: on the sequence's home, or each on the
  // stripe that had most to give.
  void FollowGrowth(SequenceId id, Sequence& sequence) {
    const PageTable& table = ledger_.table(id);
    int32_t previous = sequence.pages.empty() ? static_cast<int32_t>(options_.num_stripes) - 1
                                              : sequence.pages.back().first;
    for (int64_t page = sequence.end(); page < table.end_page(); ++page) {
      const PageKey key = KeyOf(table.pages[page - table.first_page]);
      if (options_.one_stripe_per_sequence) {
        EXPECT_EQ(key.first, sequence.home);
        Take(key);
        sequence.pages.push_back(key);
        continue;
      }
      for (int32_t step = 1; step <= options_.num_stripes; ++step) {
        const int32_t stripe = (previous + step) % static_cast<int32_t>(options_.num_stripes);
        if (stripe == key.first) break;
        EXPECT_LT(NumAvailable(stripe), NumAvailable(key.first)) << "stripe " << stripe;
      }
      for (int32_t stripe = 0; stripe < options_.num_stripes; ++stripe) {
        EXPECT_LE(NumAvailable(stripe), NumAvailable(key.first)) << "stripe " << stripe;
      }
      Take(key);
      sequence.pages.push_back(key);
      previous = key.first;
    }
  }

  const PageLedgerOptions options_;
  PageLedger ledger_;
  std::map<PageKey, Page> pages_;
  std::map<Prefix, PageKey> index_;
  std::vector<std::vector<PageKey>> evictable_;  // by stripe, oldest first
  std::map<SequenceId, Sequence> sequences_;
  int64_t num_evicted_ = 0;
};

// stripes, page size, pages per stripe, window, prefix caching, one stripe per sequence
using Config = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, bool>;

class PageLedgerShadowTest : public testing::TestWithParam<Config> {};

TEST_P(PageLedgerShadowTest, AgreesAfterEachOfManyRandomOperations) {
  PageLedgerOptions options;
  std::tie(options.num_stripes, options.page_size, options.pages_per_stripe, options.window,
           options.enable_prefix_caching, options.one_stripe_per_sequence) = GetParam();
  options.model_id = "tiny";
  Shadow shadow(options);
  std::mt19937_64 random(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  const int64_t longest = 8 * options.page_size;
  const auto any_id = [&] { return static_cast<SequenceId>(below(6)); };

  for (int operation = 0; operation < 12'000; ++operation) {
    SCOPED_TRACE(testing::Message() << "operation " << operation);
    const std::vector<SequenceId> ids = shadow.ids();
    const int64_t kind = ids.empty() ? 0 : below(12);
    const SequenceId id = ids.empty() ? any_id() : ids[below(std::ssize(ids))];
    if (kind < 3) {
      // Few different tokens, so that prefixes recur; now and then a duplicate id.
      std::vector<int32_t> tokens(1 + below(longest));
      const int64_t alike = below(longest);
      for (int64_t i = 0; i < std::ssize(tokens); ++i) {
        tokens[i] = i < alike ? 0 : static_cast<int32_t>(below(2));
      }
      const int64_t num_tokens = std::ssize(tokens) + 1;
      shadow.Admit(any_id(), std::move(tokens), num_tokens, below(8) > 0, below(4) ? "" : "salt");
    } else if (kind < 5) {
      const int64_t num_shared = below(shadow.committed(id) + 1);
      shadow.Fork(id, any_id(), num_shared, num_shared + 1 + below(options.page_size + 1));
    } else if (kind < 7) {
      shadow.Reserve(id, shadow.committed(id) + below(2 * options.page_size + 1));
    } else if (kind < 10) {
      const int64_t committed = shadow.committed(id);
      shadow.Commit(id, committed + below(shadow.end_tokens(id) - committed + 1), random);
    } else {
      shadow.Release(id);
    }
    shadow.CheckAll();
    if (HasFailure()) return;
  }
  EXPECT_TRUE(!options.enable_prefix_caching || shadow.num_evicted() > 50);
  for (const SequenceId id : shadow.ids()) shadow.Release(id);
  shadow.CheckAll();
  EXPECT_EQ(shadow.ledger().num_live_pages(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PageLedgerShadowTest,
    testing::Values(Config{1, 4, 12, 0, true, false}, Config{1, 1, 7, 0, true, false},
                    Config{1, 16, 9, 0, true, false}, Config{1, 3, 12, 0, false, false},
                    Config{2, 4, 7, 0, true, false}, Config{2, 1, 5, 0, true, false},
                    Config{3, 3, 5, 0, true, false}, Config{3, 4, 1, 0, true, false},
                    Config{3, 3, 5, 0, false, false}, Config{1, 4, 12, 6, true, false},
                    Config{2, 3, 6, 7, true, false}, Config{3, 2, 5, 5, true, false},
                    Config{1, 1, 10, 4, true, false}, Config{1, 4, 8, 1, true, false},
                    Config{1, 1, 2, 0, true, false}, Config{2, 4, 7, 0, true, true},
                    Config{3, 3, 9, 0, true, true}, Config{3, 1, 7, 0, true, true},
                    Config{3, 4, 6, 0, false, true}, Config{2, 3, 6, 7, true, true},
                    Config{2, 4, 8, 1, true, true}));

}  // namespace
}  // namespace heddle
