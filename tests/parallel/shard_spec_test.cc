#include "parallel/shard_spec.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

std::vector<int64_t> Sizes(const std::vector<Range>& ranges) {
  std::vector<int64_t> sizes;
  for (const Range& range : ranges) sizes.push_back(range.size());
  return sizes;
}

// All parts in a row, without gaps.
std::vector<Range> AllParts(Range (*split)(int64_t, int, int), int64_t total, int parts) {
  std::vector<Range> ranges;
  int64_t next = 0;
  for (int p = 0; p < parts; ++p) {
    ranges.push_back(split(total, parts, p));
    EXPECT_EQ(ranges.back().begin, next);
    EXPECT_GE(ranges.back().end, next);
    next = ranges.back().end;
  }
  EXPECT_EQ(next, total);
  return ranges;
}

using Counts = std::vector<int64_t>;

TEST(ShardSpecTest, EvenSplitGivesRemaindersToTheLowest) {
  EXPECT_EQ(Sizes(AllParts(SplitEvenly, 10, 4)), (Counts{3, 3, 2, 2}));
  EXPECT_EQ(Sizes(AllParts(SplitEvenly, 2, 4)), (Counts{1, 1, 0, 0}));
  EXPECT_EQ(Sizes(AllParts(SplitEvenly, 0, 3)), (Counts{0, 0, 0}));
  for (int64_t total = 0; total < 40; ++total) {
    for (int parts = 1; parts < 12; ++parts) {
      const Counts sizes = Sizes(AllParts(SplitEvenly, total, parts));
      EXPECT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend()));
      EXPECT_LE(sizes.front() - sizes.back(), 1);
    }
  }
}

TEST(ShardSpecTest, BlockSplitCutsOnlyTheLastBlock) {
  EXPECT_EQ(SplitInBlocks(48, 16, 2, 0), (Range{0, 32}));
  EXPECT_EQ(SplitInBlocks(48, 16, 2, 1), (Range{32, 48}));
  EXPECT_EQ(SplitInBlocks(40, 16, 2, 1), (Range{32, 40}));
  EXPECT_EQ(SplitInBlocks(40, 16, 5, 4), (Range{40, 40}));
  for (int64_t total = 0; total < 70; ++total) {
    for (int64_t block = 1; block < 20; ++block) {
      for (int parts = 1; parts < 7; ++parts) {
        int64_t next = 0;
        for (int p = 0; p < parts; ++p) {
          const Range range = SplitInBlocks(total, block, parts, p);
          ASSERT_EQ(range.begin, next);
          ASSERT_TRUE(range.end % block == 0 || range.end == total);
          next = range.end;
        }
        ASSERT_EQ(next, total);
      }
    }
  }
}

TEST(ShardSpecTest, VocabularyIsCutAtBlocksWhenLargeEnough) {
  EXPECT_EQ(Sizes(AllParts(SplitVocabulary, 49152, 5)), (Counts{10240, 10240, 10240, 9216, 9216}));
  EXPECT_EQ(Sizes(AllParts(SplitVocabulary, 32001, 2)), (Counts{16384, 15617}));
  EXPECT_EQ(Sizes(AllParts(SplitVocabulary, 2048, 2)), (Counts{1024, 1024}));
  // Too small for a block a rank: uneven, and the last ids have a home all the same.
  EXPECT_EQ(Sizes(AllParts(SplitVocabulary, 2047, 2)), (Counts{1024, 1023}));
  EXPECT_EQ(Sizes(AllParts(SplitVocabulary, 259, 4)), (Counts{65, 65, 65, 64}));
  EXPECT_EQ(Sizes(AllParts(SplitVocabulary, 259, 8)), (Counts{33, 33, 33, 32, 32, 32, 32, 32}));
  EXPECT_EQ(Sizes(AllParts(SplitVocabulary, 3, 5)), (Counts{1, 1, 1, 0, 0}));
}

FfnShape Ffn(int64_t columns, int64_t block_columns, double bytes_per_column) {
  return {
      .num_columns = columns, .block_columns = block_columns, .bytes_per_column = bytes_per_column};
}

std::vector<Range> MustSplitFfn(const FfnShape& ffn, const Counts& attention_bytes) {
  auto columns = SplitFfn(ffn, attention_bytes);
  EXPECT_TRUE(columns.ok()) << columns.status();
  return *std::move(columns);
}

TEST(ShardSpecTest, FfnColumnsAreWholeQuantisationBlocks) {
  const auto columns = MustSplitFfn(Ffn(11008, 128, 100), {0, 0, 0, 0});
  EXPECT_EQ(Sizes(columns), (Counts{22 * 128, 22 * 128, 21 * 128, 21 * 128}));
  EXPECT_EQ(Sizes(MustSplitFfn(Ffn(48, 16, 3), {5, 5})), (Counts{32, 16}));
  // Fewer blocks than ranks: the rest join with zeros.
  EXPECT_EQ(Sizes(MustSplitFfn(Ffn(96, 48, 3), {0, 0, 0})), (Counts{48, 48, 0}));
  EXPECT_EQ(Sizes(MustSplitFfn(Ffn(100, 48, 3), {0, 0, 0})), (Counts{48, 48, 4}));
}

TEST(ShardSpecTest, BlocksThatMayBeCutAreWhereThereAreTooFew) {
  const auto sizes = [](int64_t columns, int64_t block, const Counts& attention) {
    FfnShape ffn = Ffn(columns, block, 3);
    ffn.may_cut_blocks = true;
    return Sizes(MustSplitFfn(ffn, attention));
  };
  EXPECT_EQ(sizes(2048, 128, {0, 0, 0, 0, 0}), (Counts{512, 384, 384, 384, 384}));
  EXPECT_EQ(sizes(48, 16, {0, 0, 0}), (Counts{16, 16, 16}));
  EXPECT_EQ(sizes(48, 16, {0, 0, 0, 0, 0}), (Counts{10, 10, 10, 9, 9}));
  EXPECT_EQ(sizes(48, 24, {0, 0}), (Counts{24, 24}));
  EXPECT_EQ(sizes(20, 128, {0, 12}), (Counts{12, 8}));
  EXPECT_EQ(sizes(1, 16, {0, 0}), (Counts{1, 0}));
}

TEST(ShardSpecTest, FfnMakesUpForUnevenHeads) {
  // Nine heads as 6 + 3: the rank with fewer heads takes the columns that even out the bytes.
  const auto columns = MustSplitFfn(Ffn(1536, 1, 10), {6000, 3000});
  EXPECT_EQ(Sizes(columns), (Counts{618, 918}));
  // A rank with far too many heads gets none.
  EXPECT_EQ(Sizes(MustSplitFfn(Ffn(64, 32, 1), {1000, 0})), (Counts{0, 64}));
}

// No other deal of whole blocks has a smaller largest share.
TEST(ShardSpecTest, FfnDealIsOptimal) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const int ranks = 1 + random() % 3;
    const int64_t blocks = 1 + random() % 8;
    const int64_t block = 1 + random() % 5;
    Counts attention(ranks);
    for (int64_t& bytes : attention) bytes = random() % 60;
    const FfnShape ffn = Ffn(blocks * block, block, static_cast<double>(1 + random() % 7));
    const auto columns = MustSplitFfn(ffn, attention);
    ASSERT_EQ(columns.size(), attention.size());
    const auto largest = [&](const Counts& block_counts) {
      double most = 0;
      for (int r = 0; r < ranks; ++r) {
        most = std::max(most, attention[r] + block_counts[r] * block * ffn.bytes_per_column);
      }
      return most;
    };
    Counts dealt;
    int64_t next = 0;
    for (const Range& range : columns) {
      ASSERT_EQ(range.begin, next);
      ASSERT_EQ(range.size() % block, 0);
      dealt.push_back(range.size() / block);
      next = range.end;
    }
    ASSERT_EQ(next, ffn.num_columns);
    for (int64_t a = 0; a <= blocks; ++a) {
      for (int64_t b = 0; a + b <= blocks; ++b) {
        Counts other = {a, b, blocks - a - b};
        if (ranks < 3 && other[2] > 0) continue;
        if (ranks < 2 && other[1] > 0) continue;
        ASSERT_LE(largest(dealt), largest(other));
      }
    }
  }
}

TEST(ShardSpecTest, FfnRefusesNonsense) {
  EXPECT_THAT(std::string(SplitFfn(Ffn(0, 1, 1), Counts{0}).status().message()),
              testing::HasSubstr("0 columns"));
  EXPECT_FALSE(SplitFfn(Ffn(8, 0, 1), Counts{0}).ok());
  EXPECT_FALSE(SplitFfn(Ffn(8, 1, 0), Counts{0}).ok());
  EXPECT_FALSE(SplitFfn(Ffn(8, 1, 1), Counts{}).ok());
}

TEST(ShardSpecTest, BlocksThatAHeadCutsAreReadByBothNeighbours) {
  const BlockCover low = CoverWithBlocks({0, 24}, 16, 40);
  EXPECT_EQ(low.stored, (Range{0, 32}));
  EXPECT_EQ(low.start_offset, 0);
  const BlockCover high = CoverWithBlocks({24, 40}, 16, 40);
  EXPECT_EQ(high.stored, (Range{16, 40}));
  EXPECT_EQ(high.start_offset, 8);
  const BlockCover aligned = CoverWithBlocks({16, 32}, 16, 40);
  EXPECT_EQ(aligned.stored, (Range{16, 32}));
  EXPECT_EQ(aligned.start_offset, 0);
  EXPECT_TRUE(CoverWithBlocks({24, 24}, 16, 40).stored.empty());
}

TEST(ShardSpecTest, HeadsScaleToRows) { EXPECT_EQ((Range{2, 5}).ScaledBy(64), (Range{128, 320})); }

}  // namespace
}  // namespace heddle
