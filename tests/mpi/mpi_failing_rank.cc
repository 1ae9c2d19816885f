// A job of which one rank fails, for mpirun_failure_test. Each rank prints "pid N" first.
// Arguments: what rank 1 does (see Misbehave; or "absent": it does not join), the progress timeout
// in seconds, and how many ranks pretend to share a host (0: those that do).
#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/world_mpi.h"

namespace heddle {
namespace {

constexpr int kLastGoodStep = 20;

absl::Status Misbehave(const std::string& how, World& world) {
  if (how == "error") return absl::DataLossError("tensor model.norm.weight is missing");
  if (how == "kill") raise(SIGKILL);
  if (how == "stop" || how == "stop-unheard") raise(SIGSTOP);
  if (how == "exit") std::_Exit(7);
  if (how == "stall") {
    while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  return absl::InvalidArgumentError("unknown way to fail: " + how);
}

// Plan, compute, reduce: as the engine does.
absl::Status Steps(const std::string& how, World& world) {
  const auto backend = CreateCpuBackend({});
  ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
  for (int step = 0;; ++step) {
    std::string plan = "plan";
    RETURN_IF_ERROR(world.control->Broadcast(plan));
    if (step == kLastGoodStep && world.self.rank == 1) RETURN_IF_ERROR(Misbehave(how, world));
    while (step == kLastGoodStep && how == "stop-unheard") {
      // Nobody waits, so nobody but the watch threads can notice.
      world.control->ReportProgress();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    float x[1000] = {};
    RETURN_IF_ERROR(
        world.communicator->AllReduce(x, 1000, DType::kFloat32, ReduceOp::kSum, *stream));
    RETURN_IF_ERROR(stream->Synchronize());
  }
}

}  // namespace
}  // namespace heddle

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  std::printf("pid %d\n", getpid());
  std::fflush(stdout);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (argv[1] == std::string("absent") && rank == 1) {
    std::this_thread::sleep_for(std::chrono::minutes(1));
  }
  absl::StatusOr<heddle::World> world = heddle::JoinMpiWorld(
      {.progress_timeout_seconds = std::atof(argv[2]), .ranks_per_node = std::atoi(argv[3])});
  if (!world.ok()) {
    std::fprintf(stderr, "%s\n", world.status().ToString().c_str());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  heddle::SetLogPrefix("rank " + std::to_string(world->self.rank) + " " + world->self.host);
  world->control->Abort(heddle::Steps(argv[1], *world));
  MPI_Abort(MPI_COMM_WORLD, 1);
}
