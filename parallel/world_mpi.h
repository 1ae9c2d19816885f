// A job whose ranks are MPI processes.
#pragma once

#include "absl/status/statusor.h"
#include "parallel/world.h"

namespace heddle {

struct MpiWorldOptions {
  double progress_timeout_seconds = 60;
  // For tests on one machine: groups of this many ranks pretend to be nodes. 0: ask MPI.
  int ranks_per_node = 0;
};

// Collective over MPI_COMM_WORLD, which is duplicated. MPI must have been initialised with
// MPI_THREAD_MULTIPLE (FailedPrecondition else). Ranks of a node share a window of memory; between
// nodes messages are MPI's. The World must be gone before MPI_Finalize.
//
// A job that was aborted and still runs seconds later (a rank is stopped or never waits) is ended
// with MPI_Abort.
absl::StatusOr<World> JoinMpiWorld(const MpiWorldOptions& options);

}  // namespace heddle
