// Every collective between MPI processes, against the reference. Exits 0 if all ranks agree.
// Argument: ranks that pretend to share a host; none: those that do.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/base/status_macros.h"
#include "parallel/world_mpi.h"
#include "tests/parallel/collective_checks.h"

namespace heddle {
namespace {

absl::Status CheckAll(World& world) {
  RETURN_IF_ERROR(CheckControlChannel(world));
  for (const int64_t count : kMessageSizes) {
    RETURN_IF_ERROR(CheckCollectives(*world.communicator, count, CpuStreamMode::kImmediate));
  }
  RETURN_IF_ERROR(CheckCollectives(*world.communicator, 4096, CpuStreamMode::kDeferred));
  RETURN_IF_ERROR(CheckSplits(world, 10'000));
  return world.control->Barrier();
}

absl::Status Run(int ranks_per_node) {
  absl::StatusOr<World> world = JoinMpiWorld({.ranks_per_node = ranks_per_node});
  if (!world.ok()) return world.status();
  const RankInfo& self = world->self;
  if (ranks_per_node > 0 && self.node_index != self.rank / ranks_per_node) {
    return absl::InternalError("ranks are on the wrong nodes");
  }
  if (ranks_per_node == 0 && (self.num_nodes != 1 || self.node_rank != self.rank)) {
    return absl::InternalError("this machine is not one node");
  }
  const absl::Status status = CheckAll(*world);
  if (!status.ok()) world->control->Abort(status);
  return status;
}

}  // namespace
}  // namespace heddle

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  const absl::Status status = heddle::Run(argc > 1 ? std::atoi(argv[1]) : 0);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
