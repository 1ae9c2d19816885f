#include "parallel/kv_grid.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace heddle {
namespace {

std::vector<int64_t> DivisorsOf(int64_t n) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) divisors.push_back(d);
  }
  return divisors;
}

// The heads of one head shard.
struct ShardHeads {
  Range query_heads;
  Range kv_heads;
};

ShardHeads DealHeads(int64_t query_heads, int64_t kv_heads, int num_shards, int shard) {
  const int64_t group_size = query_heads / kv_heads;
  if (num_shards <= kv_heads) {
    const Range kv = SplitEvenly(kv_heads, num_shards, shard);
    return {kv.ScaledBy(group_size), kv};
  }
  // The inverse deal: shards are dealt to KV heads, so that each knows how many share it.
  for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const Range shards = SplitEvenly(num_shards, static_cast<int>(kv_heads), kv_head);
    if (!shards.Contains(shard)) continue;
    const Range of_group = SplitEvenly(group_size, shards.size(), shard - shards.begin);
    const int64_t first = kv_head * group_size;
    const Range query = {first + of_group.begin, first + of_group.end};
    return {query, query.empty() ? Range{kv_head, kv_head} : Range{kv_head, kv_head + 1}};
  }
  return {};  // Unreachable: every shard was dealt to a KV head.
}

std::string Describe(Range heads) {
  if (heads.empty()) return "none";
  return absl::StrFormat("%d-%d", heads.begin, heads.end - 1);
}

}  // namespace

absl::StatusOr<KvGrid> KvGrid::Create(int64_t total_query_heads, int64_t total_kv_heads,
                                      int num_ranks, int num_stripes) {
  std::vector<std::string> reasons;
  if (num_ranks < 1) {
    reasons.push_back(absl::StrCat("the number of ranks is ", num_ranks, "; it must be 1 or more"));
  } else if (num_stripes < 1 || num_ranks % num_stripes != 0) {
    reasons.push_back(
        absl::StrCat(num_stripes, " stripes do not divide ", num_ranks,
                     " ranks; these would: ", absl::StrJoin(DivisorsOf(num_ranks), ", ")));
  }
  if (total_query_heads < 1 || total_kv_heads < 1) {
    reasons.push_back(absl::StrCat("the model has ", total_query_heads, " query heads and ",
                                   total_kv_heads, " KV heads; both must be 1 or more"));
  } else if (total_query_heads % total_kv_heads != 0) {
    reasons.push_back(absl::StrCat(total_query_heads, " query heads are not a multiple of ",
                                   total_kv_heads, " KV heads; these KV heads would be: ",
                                   absl::StrJoin(DivisorsOf(total_query_heads), ", ")));
  }
  if (!reasons.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("heads cannot be dealt to ranks: ", absl::StrJoin(reasons, "; also, ")));
  }
  return KvGrid(total_query_heads, total_kv_heads, num_ranks, num_stripes);
}

absl::StatusOr<KvGrid> KvGrid::CreateDataParallel(int64_t total_query_heads, int64_t total_kv_heads,
                                                  int num_ranks) {
  absl::StatusOr<KvGrid> grid = Create(total_query_heads, total_kv_heads, num_ranks, num_ranks);
  if (!grid.ok()) return grid;
  grid->data_parallel_ = true;
  for (KvGridRank& place : grid->ranks_) place.query_heads = place.group_query_heads;
  return grid;
}

KvGrid::KvGrid(int64_t total_query_heads, int64_t total_kv_heads, int num_ranks, int num_stripes)
    : total_query_heads_(total_query_heads),
      total_kv_heads_(total_kv_heads),
      num_stripes_(num_stripes),
      ranks_(num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    KvGridRank& place = ranks_[rank];
    place.head_shard = rank / num_stripes;
    place.stripe = rank % num_stripes;
    const ShardHeads heads =
        DealHeads(total_query_heads, total_kv_heads, num_head_shards(), place.head_shard);
    place.group_query_heads = heads.query_heads;
    place.kv_heads = heads.kv_heads;
    const Range own = SplitEvenly(heads.query_heads.size(), num_stripes, place.stripe);
    place.query_heads = {heads.query_heads.begin + own.begin, heads.query_heads.begin + own.end};
  }
}

std::string KvGrid::ToString() const {
  std::string text =
      absl::StrFormat("%d head shards x %d stripes, %d query heads, %d KV heads\n",
                      num_head_shards(), num_stripes_, total_query_heads_, total_kv_heads_);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const KvGridRank& place = ranks_[rank];
    absl::StrAppendFormat(&text, "rank %d: shard %d stripe %d, query heads %s, KV heads %s\n", rank,
                          place.head_shard, place.stripe, Describe(place.query_heads),
                          Describe(place.kv_heads));
  }
  return text;
}

}  // namespace heddle
