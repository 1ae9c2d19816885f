// What one rank has of the job.
#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "parallel/control_channel.h"

namespace heddle {

// Where a rank stands. Immutable once the world is made.
struct RankInfo {
  int rank = 0;
  int size = 1;
  int node_rank = 0;  // among the ranks of its node
  int node_size = 1;
  int node_index = 0;  // nodes are numbered by their lowest rank
  int num_nodes = 1;
  std::string host = "localhost";
};

// Owned by the rank's main thread and given up as a whole, after the last collective and before
// MPI is finalised. ThreadWorld (thread_world.h) and JoinMpiWorld (world_mpi.h) make them.
struct World {
  RankInfo self;
  std::unique_ptr<ControlChannel> control;
  // The tensor plane over all ranks, for CPU streams.
  std::unique_ptr<Communicator> communicator;
};

}  // namespace heddle
