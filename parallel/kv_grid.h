// Who owns which attention heads: N tensor-parallel ranks as a grid of head shards x stripes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "parallel/shard_spec.h"

namespace heddle {

// One rank's place in the grid. All ranges are global head indexes.
struct KvGridRank {
  int head_shard = 0;
  int stripe = 0;
  // Query heads whose projections this rank holds; every query head belongs to exactly one rank, or
  // to all where attention is data-parallel.
  Range query_heads;
  // Query heads of the whole stripe group; equal to query_heads when there is one stripe.
  Range group_query_heads;
  // KV heads of the stripe group, held by each of its ranks: exactly those that
  // group_query_heads read, so empty when the group has no query heads.
  Range kv_heads;
};

// Immutable. Rank r is head shard r / num_stripes and stripe r % num_stripes, so that a stripe
// group is a run of neighbouring ranks.
//
// With K KV heads and H head shards: H <= K deals whole KV heads with all their query heads; H > K
// replicates each KV head on floor(H/K) or ceil(H/K) shards, which split its query heads. Counts
// differ by at most one and remainders go to the lowest shards. A KV head is never cut. With more
// shards than query heads some shards are empty; such a rank joins every collective with zeros.
class KvGrid {
 public:
  // InvalidArgument names every reason at once, with the counts that would work.
  static absl::StatusOr<KvGrid> Create(int64_t total_query_heads, int64_t total_kv_heads,
                                       int num_ranks, int num_stripes = 1);
  // For data-parallel attention: a stripe a rank, each of which has all heads and attends for the
  // sequences of its stripe alone. No head is dealt, and nothing exchanged within the group.
  static absl::StatusOr<KvGrid> CreateDataParallel(int64_t total_query_heads,
                                                   int64_t total_kv_heads, int num_ranks);

  int64_t total_query_heads() const { return total_query_heads_; }
  int64_t total_kv_heads() const { return total_kv_heads_; }
  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  int num_stripes() const { return num_stripes_; }
  bool data_parallel() const { return data_parallel_; }
  int num_head_shards() const { return num_ranks() / num_stripes_; }
  // Query heads that share one KV head.
  int64_t group_size() const { return total_query_heads_ / total_kv_heads_; }

  const KvGridRank& rank(int rank) const { return ranks_[rank]; }
  int RankOf(int head_shard, int stripe) const { return head_shard * num_stripes_ + stripe; }

  // A line a rank, as `inspect` prints it.
  std::string ToString() const;

 private:
  KvGrid(int64_t total_query_heads, int64_t total_kv_heads, int num_ranks, int num_stripes);

  int64_t total_query_heads_;
  int64_t total_kv_heads_;
  int num_stripes_;
  bool data_parallel_ = false;
  std::vector<KvGridRank> ranks_;
};

}  // namespace heddle
