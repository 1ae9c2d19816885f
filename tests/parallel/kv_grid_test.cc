#include "parallel/kv_grid.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

KvGrid MustCreate(int64_t query_heads, int64_t kv_heads, int ranks, int stripes = 1) {
  auto grid = KvGrid::Create(query_heads, kv_heads, ranks, stripes);
  EXPECT_TRUE(grid.ok()) << grid.status();
  return *std::move(grid);
}

std::vector<int64_t> QueryCounts(const KvGrid& grid) {
  std::vector<int64_t> counts;
  for (int r = 0; r < grid.num_ranks(); ++r) counts.push_back(grid.rank(r).query_heads.size());
  return counts;
}

std::vector<int64_t> KvCounts(const KvGrid& grid) {
  std::vector<int64_t> counts;
  for (int r = 0; r < grid.num_ranks(); ++r) counts.push_back(grid.rank(r).kv_heads.size());
  return counts;
}

using Counts = std::vector<int64_t>;

TEST(KvGridTest, DealsWholeGroupsUnevenly) {
  const KvGrid smollm = MustCreate(9, 3, 2);
  EXPECT_EQ(QueryCounts(smollm), (Counts{6, 3}));
  EXPECT_EQ(KvCounts(smollm), (Counts{2, 1}));
  EXPECT_EQ(smollm.rank(1).query_heads, (Range{6, 9}));
  EXPECT_EQ(KvCounts(MustCreate(32, 8, 5)), (Counts{2, 2, 2, 1, 1}));
  EXPECT_EQ(KvCounts(MustCreate(8, 8, 2)), (Counts{4, 4}));
}

TEST(KvGridTest, ReplicatesKvHeadsWhenShardsOutnumberThem) {
  const KvGrid qwen = MustCreate(28, 4, 8);
  EXPECT_EQ(QueryCounts(qwen), (Counts{4, 3, 4, 3, 4, 3, 4, 3}));
  EXPECT_EQ(KvCounts(qwen), (Counts{1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(qwen.rank(3).kv_heads, (Range{1, 2}));
  EXPECT_EQ(qwen.total_kv_heads(), 4);

  // Three KV heads on four shards: the first is shared by two.
  const KvGrid odd = MustCreate(6, 3, 4);
  EXPECT_EQ(QueryCounts(odd), (Counts{1, 1, 2, 2}));
  EXPECT_EQ(odd.rank(0).kv_heads, (Range{0, 1}));
  EXPECT_EQ(odd.rank(1).kv_heads, (Range{0, 1}));
  EXPECT_EQ(odd.rank(2).kv_heads, (Range{1, 2}));
  EXPECT_EQ(odd.rank(3).kv_heads, (Range{2, 3}));
}

TEST(KvGridTest, ShardsWithoutQueryHeadsHoldNoKv) {
  const KvGrid grid = MustCreate(4, 1, 8);
  EXPECT_EQ(QueryCounts(grid), (Counts{1, 1, 1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(KvCounts(grid), (Counts{1, 1, 1, 1, 0, 0, 0, 0}));
}

TEST(KvGridTest, StripeGroupsShareKvAndSplitProjections) {
  const KvGrid mla = MustCreate(16, 1, 4, 4);
  EXPECT_EQ(mla.num_head_shards(), 1);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(mla.rank(r).stripe, r);
    EXPECT_EQ(mla.rank(r).kv_heads, (Range{0, 1}));
    EXPECT_EQ(mla.rank(r).group_query_heads, (Range{0, 16}));
    EXPECT_EQ(mla.rank(r).query_heads, (Range{4 * r, 4 * r + 4}));
  }
  // More ranks than query heads in a stripe group: those without keep the KV for their pages.
  const KvGrid wide = MustCreate(4, 1, 8, 8);
  EXPECT_EQ(QueryCounts(wide), (Counts{1, 1, 1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(KvCounts(wide), (Counts{1, 1, 1, 1, 1, 1, 1, 1}));
}

TEST(KvGridTest, RefusesWithEveryReasonAndWhatWouldWork) {
  const auto both = KvGrid::Create(10, 4, 6, 4);
  ASSERT_FALSE(both.ok());
  EXPECT_EQ(both.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(both.status().message()),
              AllOf(HasSubstr("4 stripes do not divide 6 ranks; these would: 1, 2, 3, 6"),
                    HasSubstr("10 query heads are not a multiple of 4 KV heads"),
                    HasSubstr("1, 2, 5, 10")));
  EXPECT_FALSE(KvGrid::Create(8, 2, 0).ok());
  EXPECT_FALSE(KvGrid::Create(8, 2, -1).ok());
  EXPECT_FALSE(KvGrid::Create(8, 2, 4, 0).ok());
  EXPECT_FALSE(KvGrid::Create(8, 0, 4).ok());
  EXPECT_FALSE(KvGrid::Create(0, 2, 4).ok());
  EXPECT_FALSE(KvGrid::Create(2, 4, 2).ok());
  EXPECT_FALSE(KvGrid::Create(8, 2, 4, 8).ok());
}

// Every property the rest of the engine relies on, over all small shapes.
TEST(KvGridTest, PropertiesHoldForAllSmallShapes) {
  for (int64_t kv_heads = 1; kv_heads <= 9; ++kv_heads) {
    for (int64_t group = 1; group <= 6; ++group) {
      const int64_t query_heads = kv_heads * group;
      for (int ranks = 1; ranks <= 17; ++ranks) {
        for (int stripes = 1; stripes <= ranks; ++stripes) {
          SCOPED_TRACE(testing::Message()
                       << query_heads << " query heads, " << kv_heads << " KV heads, " << ranks
                       << " ranks, " << stripes << " stripes");
          const auto created = KvGrid::Create(query_heads, kv_heads, ranks, stripes);
          if (ranks % stripes != 0) {
            ASSERT_FALSE(created.ok());
            continue;
          }
          ASSERT_TRUE(created.ok()) << created.status();
          const KvGrid& grid = *created;
          const int shards = ranks / stripes;

          int64_t next_query_head = 0;
          std::vector<int64_t> replicas(kv_heads, 0);
          int64_t least_kv = kv_heads, most_kv = 0;
          for (int r = 0; r < ranks; ++r) {
            const KvGridRank& place = grid.rank(r);
            ASSERT_EQ(grid.RankOf(place.head_shard, place.stripe), r);
            // In rank order the ranks own every query head exactly once.
            ASSERT_EQ(place.query_heads.begin, next_query_head);
            next_query_head = place.query_heads.end;
            // A rank's own heads are among its group's, and the group's KV heads are exactly those
            // its query heads read.
            const Range& of_group = place.group_query_heads;
            ASSERT_LE(of_group.begin, place.query_heads.begin);
            ASSERT_GE(of_group.end, place.query_heads.end);
            ASSERT_EQ(of_group.empty(), place.kv_heads.empty());
            if (!of_group.empty()) {
              ASSERT_EQ(place.kv_heads.begin, of_group.begin / group);
              ASSERT_EQ(place.kv_heads.end, (of_group.end - 1) / group + 1);
            }
            if (shards <= query_heads) {
              ASSERT_FALSE(of_group.empty());
            }
            if (stripes == 1) {
              ASSERT_EQ(of_group, place.query_heads);
            }

            const KvGridRank& first = grid.rank(grid.RankOf(place.head_shard, 0));
            ASSERT_EQ(of_group, first.group_query_heads);
            ASSERT_EQ(place.kv_heads, first.kv_heads);
            ASSERT_LE(place.query_heads.size(), first.query_heads.size());
            ASSERT_GE(place.query_heads.size() + 1, first.query_heads.size());
            if (place.stripe == 0) {
              least_kv = std::min(least_kv, place.kv_heads.size());
              most_kv = std::max(most_kv, place.kv_heads.size());
              for (int64_t h = place.kv_heads.begin; h < place.kv_heads.end; ++h) ++replicas[h];
            }
          }
          ASSERT_EQ(next_query_head, query_heads);
          ASSERT_LE(most_kv - least_kv, 1);

          const auto [fewest, most] = std::minmax_element(replicas.begin(), replicas.end());
          ASSERT_GE(*fewest, 1);
          if (shards <= kv_heads) {
            // A KV head is never cut and never copied.
            ASSERT_EQ(*most, 1);
            for (int r = 0; r < ranks; ++r) {
              ASSERT_EQ(grid.rank(r).group_query_heads, grid.rank(r).kv_heads.ScaledBy(group));
            }
          } else {
            ASSERT_LE(most_kv, 1);
            ASSERT_LE(*most - *fewest, 1);
          }
          // Remainders go to the lowest shards.
          ASSERT_TRUE(std::is_sorted(replicas.rbegin(), replicas.rend()));
          for (int s = 1; s < shards && shards <= kv_heads; ++s) {
            ASSERT_LE(grid.rank(grid.RankOf(s, 0)).kv_heads.size(),
                      grid.rank(grid.RankOf(s - 1, 0)).kv_heads.size());
          }
        }
      }
    }
  }
}

TEST(KvGridTest, PrintsALineARank) {
  EXPECT_EQ(MustCreate(4, 1, 5).ToString(),
            "5 head shards x 1 stripes, 4 query heads, 1 KV heads\n"
            "rank 0: shard 0 stripe 0, query heads 0-0, KV heads 0-0\n"
            "rank 1: shard 1 stripe 0, query heads 1-1, KV heads 0-0\n"
            "rank 2: shard 2 stripe 0, query heads 2-2, KV heads 0-0\n"
            "rank 3: shard 3 stripe 0, query heads 3-3, KV heads 0-0\n"
            "rank 4: shard 4 stripe 0, query heads none, KV heads none\n");
}

TEST(KvGridTest, DataParallelRanksHaveAllHeadsAndAStripeEach) {
  for (const int num_ranks : {1, 3, 8}) {
    const absl::StatusOr<KvGrid> grid = KvGrid::CreateDataParallel(6, 1, num_ranks);
    ASSERT_TRUE(grid.ok()) << grid.status();
    EXPECT_TRUE(grid->data_parallel());
    EXPECT_EQ(grid->num_stripes(), num_ranks);
    EXPECT_EQ(grid->num_head_shards(), 1);
    for (int rank = 0; rank < num_ranks; ++rank) {
      EXPECT_EQ(grid->rank(rank).stripe, rank);
      EXPECT_EQ(grid->rank(rank).query_heads, (Range{0, 6}));
      EXPECT_EQ(grid->rank(rank).kv_heads, (Range{0, 1}));
    }
  }
  EXPECT_FALSE(KvGrid::Create(6, 1, 3, 3)->data_parallel());
  EXPECT_THAT(std::string(KvGrid::CreateDataParallel(6, 4, 0).status().message()),
              testing::AllOf(testing::HasSubstr("number of ranks is 0"),
                             testing::HasSubstr("6 query heads are not a multiple of 4")));
}

}  // namespace
}  // namespace heddle
