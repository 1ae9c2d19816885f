#include "cache/page_ledger.h"

#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

PageLedgerOptions Options(int64_t page_size, int64_t num_pages) {
  PageLedgerOptions options;
  options.page_size = page_size;
  options.pages_per_stripe = num_pages;
  options.enable_prefix_caching = true;
  return options;
}

std::vector<int32_t> Tokens(int64_t size) {
  std::vector<int32_t> tokens(size);
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

// Reuse is floor((n - 1) / page) pages: of a prompt known in full, the last token is computed.
TEST(PageLedgerTest, TheLastTokenIsAlwaysComputed) {
  const std::vector<std::pair<int64_t, int64_t>> cases = {
      {4, 0}, {5, 4}, {7, 4}, {8, 4}, {9, 8}, {12, 8}, {13, 12}, {16, 12}, {17, 16}};
  for (const auto& [size, cached] : cases) {
    PageLedger ledger(Options(4, 16));
    const std::vector<int32_t> prompt = Tokens(size);
    EXPECT_EQ(*ledger.Admit(1, prompt, size + 1), 0);
    ledger.Commit(1, prompt, size);
    EXPECT_EQ(*ledger.Admit(2, prompt, size + 1), cached) << size;
    ledger.Commit(2, prompt, size);
    ledger.Release(1);
    ledger.Release(2);
    EXPECT_EQ(*ledger.Admit(3, prompt, size + 1), cached) << size;
    ledger.Release(3);
    EXPECT_TRUE(ledger.CheckIntegrity().ok()) << ledger.CheckIntegrity();
    EXPECT_EQ(ledger.num_live_pages(), 0);
  }
}

}  // namespace
}  // namespace heddle
