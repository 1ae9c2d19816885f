#include "parallel/communicator.h"

#include "kernels/base/logging.h"
#include "parallel/kv_grid.h"

namespace heddle {

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::SplitAlong(const KvGrid& grid,
                                                                       GridAxis axis) {
  CHECK_EQ(grid.num_ranks(), size());
  const KvGridRank& place = grid.rank(rank());
  return axis == GridAxis::kStripe ? Split(place.head_shard, place.stripe)
                                   : Split(place.stripe, place.head_shard);
}

}  // namespace heddle
