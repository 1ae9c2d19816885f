// How the ranks of a stripe group attend together: each over its own pages, for all their heads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/stream.h"
#include "parallel/communicator.h"
#include "parallel/kv_grid.h"

namespace heddle {

// A round gathers the queries of some heads of every rank, lets the caller attend with all of them
// over this rank's pages, and gives each rank its own heads' outputs, merged over the stripes in
// stripe order. All ranks of the group make the same rounds; a rank may have no heads in one.
//
// Owned by an attention block. Head ranges are counted from each rank's own first head.
class StripeExchange {
 public:
  // Collective over `world`, whose ranks are the grid's. `max_rows` is the most stripes x tokens x
  // heads of one rank in a round.
  static absl::StatusOr<std::unique_ptr<StripeExchange>> Create(const KvGrid& grid, int rank,
                                                                int64_t max_rows, int64_t query_dim,
                                                                int64_t value_dim,
                                                                Communicator& world,
                                                                Backend& backend);

  Communicator& group() { return *group_; }
  // The most heads that a rank of the group has.
  int64_t max_heads() const { return max_heads_; }
  // The most heads a rank may bring to a round of that many tokens.
  int64_t HeadsOfRound(int64_t tokens) const;

  // A round with heads [first, first + count) of each rank that has them. `own` [tokens, heads,
  // query_dim] are this rank's; the result [tokens, group's heads of the round, query_dim] is
  // head-major.
  absl::StatusOr<ConstHeadsView> GatherQueries(ConstHeadsView own, int64_t first, int64_t count,
                                               Stream& stream);
  // Where the caller leaves what it computed with the gathered queries: outputs, and
  // log-sum-exps [tokens, heads, 1].
  HeadsView partial_out() const { return Part(0, value_dim_); }
  HeadsView partial_log_sum_exp() const { return Part(value_dim_, 1); }
  // Ends the round: `out` [tokens, own heads, value_dim].
  absl::Status Merge(HeadsView out, Stream& stream);

 private:
  StripeExchange(const KvGrid& grid, int rank, int64_t max_rows, int64_t query_dim,
                 int64_t value_dim, const KernelTable& kernels);

  HeadsView Part(int64_t offset, int64_t dim) const;

  const KernelTable& kernels_;
  std::unique_ptr<Communicator> group_;
  std::vector<int64_t> heads_;  // of each rank of the group
  int64_t max_heads_ = 0;
  int64_t max_rows_;
  int64_t query_dim_;
  int64_t value_dim_;
  DeviceBuffer queries_;   // [group's heads, tokens, query_dim]
  DeviceBuffer partials_;  // [group's heads, tokens, value_dim + 1]
  DeviceBuffer received_;  // [stripes, own heads, tokens, value_dim + 1]
  // Of the round.
  int64_t tokens_ = 0;
  std::vector<int64_t> round_heads_;  // of each rank of the group
};

}  // namespace heddle
