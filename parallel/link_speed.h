// How fast the ranks of this job exchange tensors, at this very moment: for the cost model.
#pragma once

#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "parallel/world.h"

namespace heddle {

// Of one kind of collective: a call takes latency_seconds + bytes / bytes_per_second. Both
// positive.
struct CollectiveSpeed {
  double latency_seconds = 0;   // of a call that moves next to nothing
  double bytes_per_second = 0;  // that a rank receives while it sends as many
};

// Collective over `world`, of at least two ranks, and over in some tens of milliseconds where ranks
// share memory. Each is a line through what a small and a large call add to rounds of work, all
// ranks' waits included; all return the same. `backend` and `stream` are the rank's own.
//
// An all-reduce over all ranks; of n bytes each receives 2 (N - 1) / N n, as around a ring.
absl::StatusOr<CollectiveSpeed> MeasureAllReduce(World& world, Backend& backend, Stream& stream);

// What every `group_size` ranks in a row send each other while all other groups do the same;
// `group_size` is above one and divides the number of ranks. Below it, a group is split off the
// world for good (Communicator::Split).
absl::StatusOr<CollectiveSpeed> MeasureExchange(World& world, int group_size, Backend& backend,
                                                Stream& stream);

}  // namespace heddle
