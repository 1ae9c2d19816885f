#include "cache/page_ledger.h"

#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

PageLedgerOptions Options(int64_t page_size, int64_t num_pages) {
  PageLedgerOptions options;
  options.page_size = page_size;
  options.pages_per_stripe = num_pages;
  options.enable_prefix_caching = true;
  return options;
}

std::vector<int32_t> Tokens(int64_t size, int32_t first = 100) {
  std::vector<int32_t> tokens(size);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Admits and computes a prompt, with room for one more token.
int64_t Compute(PageLedger& ledger, SequenceId id, const std::vector<int32_t>& prompt,
                const PrefixUse& use = {}) {
  const auto cached = ledger.Admit(id, prompt, std::ssize(prompt) + 1, use);
  EXPECT_TRUE(cached.ok()) << cached.status();
  if (!cached.ok()) return -1;
  EXPECT_TRUE(ledger.Reserve(id, std::ssize(prompt)));
  ledger.Commit(id, prompt, std::ssize(prompt));
  return *cached;
}

void ExpectIdle(const PageLedger& ledger) {
  EXPECT_TRUE(ledger.CheckIntegrity().ok()) << ledger.CheckIntegrity();
  EXPECT_EQ(ledger.num_live_pages(), 0);
  EXPECT_EQ(ledger.Waste(), 0.0);
}

// Reuse is floor((n - 1) / page) pages: of a prompt known in full, the last token is computed.
TEST(PageLedgerTest, TheLastTokenIsAlwaysComputed) {
  const std::vector<std::pair<int64_t, int64_t>> cases = {
      {4, 0}, {5, 4}, {7, 4}, {8, 4}, {9, 8}, {12, 8}, {13, 12}, {16, 12}, {17, 16}};
  for (const auto& [size, cached] : cases) {
    PageLedger ledger(Options(4, 16));
    EXPECT_EQ(Compute(ledger, 1, Tokens(size)), 0);
    EXPECT_EQ(Compute(ledger, 2, Tokens(size)), cached) << "while the first runs, " << size;
    ledger.Release(1);
    ledger.Release(2);
    EXPECT_EQ(Compute(ledger, 3, Tokens(size)), cached) << "after both, " << size;
    ledger.Release(3);
    ExpectIdle(ledger);
  }
}

TEST(PageLedgerTest, AStartTakesAllItsPagesOrNone) {
  PageLedger ledger(Options(4, 8));
  Compute(ledger, 1, Tokens(17));  // 5 pages
  EXPECT_EQ(ledger.num_available_pages(), 3);
  const auto refused = ledger.Admit(2, Tokens(12, 500), 13);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("4 more pages are needed and 3 available"));
  EXPECT_EQ(ledger.num_available_pages(), 3);
  EXPECT_FALSE(ledger.Contains(2));
  // What is shared need not be there twice.
  EXPECT_TRUE(ledger.Admit(3, Tokens(17), 25).ok());
  EXPECT_EQ(ledger.num_available_pages(), 0);
  ledger.Release(1);
  ledger.Release(3);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, PagesOfAHitAreNotEvictedForTheRestOfTheSameStart) {
  PageLedger ledger(Options(4, 4));
  Compute(ledger, 1, Tokens(9));
  ledger.Release(1);
  // Two evictable pages; the prompt shares both and needs the two others.
  EXPECT_EQ(*ledger.Admit(2, Tokens(14), 15), 8);
  // Now everything is live, and a third cannot start from the same prefix.
  EXPECT_EQ(ledger.Admit(3, Tokens(9), 10).status().code(), absl::StatusCode::kResourceExhausted);
  ledger.Release(2);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, OldestUseGoesFirstAndLeavesBeforeParents) {
  PageLedger ledger(Options(4, 6));
  Compute(ledger, 1, Tokens(11, 100));  // 3 pages, 2 of them whole
  ledger.Release(1);
  Compute(ledger, 2, Tokens(11, 200));
  ledger.Release(2);
  Compute(ledger, 1, Tokens(11, 100));  // used again
  ledger.Release(1);
  // Two pages are free; three more have to come from the oldest use's end.
  Compute(ledger, 3, Tokens(11, 300));  // takes 2 free and evicts one
  ledger.Release(3);
  EXPECT_EQ(*ledger.Admit(4, Tokens(11, 200), 1), 4) << "the leaf is gone, its parent is not";
  EXPECT_EQ(*ledger.Admit(5, Tokens(11, 100), 1), 8);
  ledger.Release(4);
  ledger.Release(5);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, PartialPagesAreNeverShared) {
  PageLedger ledger(Options(4, 16));
  Compute(ledger, 1, Tokens(7));
  EXPECT_EQ(Compute(ledger, 2, Tokens(8)), 4);
  ledger.Release(1);
  ledger.Release(2);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, OutputIsIndexedLikeThePrompt) {
  PageLedger ledger(Options(4, 16));
  Compute(ledger, 1, Tokens(5));
  ASSERT_TRUE(ledger.Reserve(1, 12));
  ledger.Commit(1, Tokens(12), 8);
  ledger.Commit(1, Tokens(12), 12);
  ledger.Release(1);
  EXPECT_EQ(Compute(ledger, 2, Tokens(13)), 12);
  ledger.Release(2);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, SaltAndWishToComputeEverythingPreventSharing) {
  PageLedger ledger(Options(4, 16));
  Compute(ledger, 1, Tokens(9));
  EXPECT_EQ(Compute(ledger, 2, Tokens(9), {.reuse = true, .salt = "tenant"}), 0);
  EXPECT_EQ(Compute(ledger, 3, Tokens(9), {.reuse = false, .salt = {}}), 0);
  EXPECT_EQ(Compute(ledger, 4, Tokens(9)), 8);
  EXPECT_EQ(Compute(ledger, 5, Tokens(9), {.reuse = true, .salt = "tenant"}), 8);
  for (SequenceId id = 1; id <= 5; ++id) ledger.Release(id);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, WithoutPrefixCachingNothingIsKept) {
  PageLedgerOptions options = Options(4, 16);
  options.enable_prefix_caching = false;
  PageLedger ledger(options);
  Compute(ledger, 1, Tokens(9));
  EXPECT_EQ(Compute(ledger, 2, Tokens(9)), 0);
  ledger.Release(1);
  ledger.Release(2);
  ExpectIdle(ledger);
}

PrefixHash OneForAll(const PrefixHash&, std::span<const int32_t>) { return {1, 1}; }

TEST(PageLedgerTest, CollidingHashesCostHitsAndNothingElse) {
  PageLedgerOptions options = Options(4, 16);
  options.prefix_hash = &OneForAll;
  PageLedger ledger(options);
  Compute(ledger, 1, Tokens(9));
  EXPECT_EQ(Compute(ledger, 2, Tokens(9)), 0);
  const auto copy = ledger.Fork(1, 3, 6, 9);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_TRUE(copy->has_value());
  for (SequenceId id = 1; id <= 3; ++id) ledger.Release(id);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, AForkSharesWholePagesAndCopiesThePartialOne) {
  PageLedger ledger(Options(4, 16));
  Compute(ledger, 1, Tokens(10));
  const PageTable parent = ledger.table(1);
  const auto copy = ledger.Fork(1, 2, 9, 11);
  ASSERT_TRUE(copy.ok()) << copy.status();
  const PageTable& child = ledger.table(2);
  EXPECT_EQ(child.pages[0], parent.pages[0]);
  EXPECT_EQ(child.pages[1], parent.pages[1]);
  ASSERT_TRUE(copy->has_value());
  EXPECT_EQ((*copy)->source, parent.pages[2]);
  EXPECT_EQ((*copy)->target, child.pages[2]);
  EXPECT_EQ(ledger.num_live_pages(), 4);
  // At a page's end there is nothing to copy.
  const auto whole = ledger.Fork(1, 3, 8, 9);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_FALSE(whole->has_value());
  // The source may go first.
  ledger.Release(1);
  ledger.Commit(2, Tokens(10), 10);
  ledger.Commit(3, Tokens(9), 9);
  ledger.Release(2);
  ledger.Release(3);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, TheCopyOfAForkStaysOnItsStripe) {
  PageLedgerOptions options = Options(4, 2);
  options.num_stripes = 2;
  PageLedger ledger(options);
  Compute(ledger, 1, Tokens(3));  // stripe 0
  ASSERT_EQ(ledger.table(1).pages[0].stripe, 0);
  auto copy = ledger.Fork(1, 2, 3, 4);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ((*copy)->target.stripe, 0);
  // Stripe 1 has two pages left; the copy cannot go there.
  copy = ledger.Fork(1, 3, 3, 4);
  EXPECT_EQ(copy.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(ledger.Admit(3, Tokens(3), 4).ok());
  for (SequenceId id = 1; id <= 3; ++id) ledger.Release(id);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, PagesGoToTheStripeWithMostToGive) {
  PageLedgerOptions options = Options(1, 4);
  options.num_stripes = 3;
  options.enable_prefix_caching = false;
  PageLedger ledger(options);
  const auto stripes_of = [&](SequenceId id) {
    std::vector<int32_t> stripes;
    for (const PageLocation& page : ledger.table(id).pages) stripes.push_back(page.stripe);
    return stripes;
  };
  ASSERT_TRUE(ledger.Admit(1, Tokens(4), 4).ok());
  EXPECT_THAT(stripes_of(1), ElementsAre(0, 1, 2, 0));
  ASSERT_TRUE(ledger.Admit(2, Tokens(3), 3).ok());
  EXPECT_THAT(stripes_of(2), ElementsAre(1, 2, 0));
  ASSERT_TRUE(ledger.Reserve(1, 5));  // ties: the stripe after that of its last page
  EXPECT_EQ(stripes_of(1).back(), 1);
  ledger.Release(1);
  ledger.Release(2);
  ExpectIdle(ledger);
}

// As data-parallel attention has it.
PageLedgerOptions HomeOptions(int64_t num_stripes, int64_t num_pages) {
  PageLedgerOptions options = Options(4, num_pages);
  options.num_stripes = num_stripes;
  options.one_stripe_per_sequence = true;
  return options;
}

TEST(PageLedgerTest, ASequenceStaysOnTheStripeWithTheFewestLivePages) {
  PageLedger ledger(HomeOptions(3, 4));
  EXPECT_EQ(ledger.CapacityTokens(), 16) << "of one stripe";
  ASSERT_TRUE(ledger.Admit(1, Tokens(7), 8).ok());
  ASSERT_TRUE(ledger.Admit(2, Tokens(3, 200), 4).ok());
  ASSERT_TRUE(ledger.Admit(3, Tokens(3, 300), 4).ok());
  ASSERT_TRUE(ledger.Admit(4, Tokens(3, 400), 4).ok());
  EXPECT_EQ(ledger.PoolOf(1), 0);
  EXPECT_EQ(ledger.PoolOf(2), 1);
  EXPECT_EQ(ledger.PoolOf(3), 2);
  EXPECT_EQ(ledger.PoolOf(4), 1) << "a page each on 1 and 2, two on 0";
  EXPECT_EQ(ledger.ReservableTokens(1), 16);
  EXPECT_TRUE(ledger.Reserve(1, 16));
  EXPECT_FALSE(ledger.Reserve(1, 17)) << "whatever is left on the others";
  EXPECT_EQ(ledger.Admit(5, Tokens(16, 500), 16).status().code(),
            absl::StatusCode::kResourceExhausted);
  for (SequenceId id = 1; id <= 4; ++id) ledger.Release(id);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, AHitPullsToItsStripeWhileThatHasRoom) {
  PageLedger ledger(HomeOptions(2, 4));
  Compute(ledger, 1, Tokens(9));  // all but one page of stripe 0
  EXPECT_EQ(Compute(ledger, 2, Tokens(10)), 8);
  EXPECT_EQ(ledger.PoolOf(2), 0) << "though stripe 1 is empty";
  EXPECT_EQ(*ledger.Fork(2, 3, 8, 8), std::nullopt);
  EXPECT_EQ(ledger.PoolOf(3), 0);
  EXPECT_EQ(ledger.Fork(2, 4, 9, 10).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Compute(ledger, 4, Tokens(10)), 0);
  EXPECT_EQ(ledger.PoolOf(4), 1) << "rather than wait for stripe 0";
  for (SequenceId id = 1; id <= 4; ++id) ledger.Release(id);
  ExpectIdle(ledger);
}

// Two sequences compute the same first page at once; one of them goes on, on another stripe.
TEST(PageLedgerTest, AHitEndsWhereThePrefixLeavesTheStripe) {
  PageLedger ledger(HomeOptions(2, 4));
  ASSERT_EQ(*ledger.Admit(1, Tokens(5), 6), 0);
  ASSERT_EQ(*ledger.Admit(2, Tokens(9), 10), 0);
  ledger.Commit(1, Tokens(5), 5);
  ledger.Commit(2, Tokens(9), 9);
  ASSERT_EQ(ledger.PoolOf(2), 1);
  EXPECT_EQ(Compute(ledger, 3, Tokens(9)), 4) << "the second page is on stripe 1";
  EXPECT_EQ(ledger.PoolOf(3), 0);
  for (SequenceId id = 1; id <= 3; ++id) ledger.Release(id);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, AWindowLetsLeadingPagesGo) {
  PageLedgerOptions options = Options(4, 4);
  options.window = 6;
  PageLedger ledger(options);
  EXPECT_EQ(ledger.CapacityTokens(), std::numeric_limits<int64_t>::max());
  ASSERT_TRUE(ledger.Admit(1, Tokens(40), 41).ok());
  EXPECT_EQ(ledger.table(1).end_page(), 3) << "as much as one token can see";
  for (int64_t computed = 1; computed <= 40; ++computed) {
    ASSERT_TRUE(ledger.Reserve(1, computed));
    ledger.Commit(1, Tokens(40), computed);
    EXPECT_EQ(ledger.table(1).first_page, std::max<int64_t>(0, computed - 5) / 4);
    ASSERT_TRUE(ledger.CheckIntegrity().ok()) << ledger.CheckIntegrity();
  }
  ledger.Release(1);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, AWindowedHitNeedsOnlyWhatIsStillSeen) {
  PageLedgerOptions options = Options(4, 8);
  options.window = 5;
  PageLedger ledger(options);
  Compute(ledger, 1, Tokens(12));
  ledger.Release(1);
  // Let the first page be evicted: it was let go first.
  Compute(ledger, 2, Tokens(21, 500));
  EXPECT_EQ(Compute(ledger, 3, Tokens(12)), 8) << "position 8 sees 4 to 8: the second page";
  EXPECT_EQ(ledger.table(3).first_page, 2) << "12 sees 8 to 12";
  ledger.Release(2);
  ledger.Release(3);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, AWindowedHitNeedsAllThatIsStillSeen) {
  PageLedgerOptions options = Options(4, 5);
  options.window = 9;
  PageLedger ledger(options);
  Compute(ledger, 1, Tokens(12));  // pages 0, 1 and 2, the first let go as the window passed it
  ledger.Release(1);
  Compute(ledger, 2, Tokens(11, 500));  // takes two free pages and page 0
  EXPECT_EQ(*ledger.Admit(3, Tokens(13), 1), 12) << "12 sees pages 1 and 2";
  ledger.Release(3);
  ASSERT_TRUE(ledger.Admit(4, Tokens(1), 2).ok());  // takes page 2
  EXPECT_EQ(*ledger.Admit(3, Tokens(13), 1), 0) << "8 would see page 0, and 12 page 2";
  for (SequenceId id = 2; id <= 4; ++id) ledger.Release(id);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, AForkNeedsWhatItsFirstTokenSees) {
  PageLedgerOptions options = Options(4, 16);
  options.window = 5;
  PageLedger ledger(options);
  Compute(ledger, 1, Tokens(12));
  EXPECT_EQ(ledger.Fork(1, 2, 6, 8).status().code(), absl::StatusCode::kFailedPrecondition);
  const auto copy = ledger.Fork(1, 2, 12, 13);
  ASSERT_TRUE(copy.ok()) << copy.status();
  ledger.Release(1);
  ledger.Release(2);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, ASecondStartOfAnIdIsRefusedAndTheFirstIsUnharmed) {
  PageLedger ledger(Options(4, 16));
  Compute(ledger, 1, Tokens(9));
  const PageTable before = ledger.table(1);
  EXPECT_EQ(ledger.Admit(1, Tokens(3), 4).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ledger.Fork(1, 1, 4, 5).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ledger.table(1).pages, before.pages);
  ledger.Release(1);
  EXPECT_EQ(Compute(ledger, 1, Tokens(9)), 8);
  ledger.Release(1);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, PromptsShorterThanAPageLeaveNothingBehind) {
  PageLedger ledger(Options(16, 4));
  for (int64_t size = 1; size < 16; ++size) {
    Compute(ledger, 1, Tokens(size));
    ledger.Release(1);
    ExpectIdle(ledger);
  }
}

TEST(PageLedgerTest, WasteIsTheEmptyShareOfPagesWithATokenOnce) {
  PageLedger ledger(Options(4, 16));
  ASSERT_TRUE(ledger.Admit(1, Tokens(9), 10).ok());
  EXPECT_EQ(ledger.Waste(), 0.0) << "no token is stored";
  ledger.Commit(1, Tokens(9), 5);
  EXPECT_DOUBLE_EQ(ledger.Waste(), 3.0 / 8.0);
  ledger.Commit(1, Tokens(9), 9);
  EXPECT_DOUBLE_EQ(ledger.Waste(), 3.0 / 12.0);
  ASSERT_TRUE(ledger.Fork(1, 2, 8, 9).ok());
  EXPECT_DOUBLE_EQ(ledger.Waste(), 3.0 / 12.0) << "shared pages count once";
  ledger.Release(1);
  ledger.Release(2);
  ExpectIdle(ledger);
}

TEST(PageLedgerTest, OptionsAreCheckedByName) {
  const auto error = [](auto change) {
    PageLedgerOptions options = Options(16, 8);
    change(options);
    return std::string(PageLedger::Validate(options).message());
  };
  EXPECT_THAT(error([](auto& o) { o.page_size = 0; }),
              HasSubstr("page size is 0; it must be at least 1"));
  EXPECT_THAT(error([](auto& o) { o.num_stripes = 0; }), HasSubstr("number of stripes is 0"));
  EXPECT_THAT(error([](auto& o) { o.pages_per_stripe = -1; }),
              HasSubstr("number of pages per stripe is -1"));
  EXPECT_THAT(error([](auto& o) { o.window = -1; }), HasSubstr("attention window is -1"));
  EXPECT_THAT(error([](auto& o) { o.pages_per_stripe = int64_t{1} << 31; }),
              HasSubstr("must each be at most 2147483647"));
}

TEST(PageTableDigestTest, DependsOnSlotStartAndPages) {
  const PageTable table = {.first_page = 1, .pages = {{0, 3}, {1, 2}}};
  const uint64_t digest = DigestPageTable(5, table);
  EXPECT_EQ(DigestPageTable(5, table), digest);
  EXPECT_NE(DigestPageTable(4, table), digest);
  EXPECT_NE(DigestPageTable(5, {.first_page = 0, .pages = table.pages}), digest);
  EXPECT_NE(DigestPageTable(5, {.first_page = 1, .pages = {{1, 2}, {0, 3}}}), digest);
  EXPECT_NE(DigestPageTable(5, {.first_page = 1, .pages = {{0, 3}}}), digest);
  EXPECT_EQ(DigestPageTable(5, {}), 0u);
}

}  // namespace
}  // namespace heddle
