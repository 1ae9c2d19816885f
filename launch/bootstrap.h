// How a process finds its place among the ranks: mpirun, srun, or alone.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "parallel/world.h"

namespace heddle {

// What the launcher told this process, read from the environment once.
struct LauncherFacts {
  bool under_mpi = false;     // a launcher that MPI_Init can talk to
  int slurm_step_tasks = 0;   // 0: not in a Slurm step
  std::string slurm_step_id;  // empty: not in a Slurm step
  std::string description;    // "mpirun, rank 1 of 4", "srun without PMIx", "none"
};
LauncherFacts ReadLauncher();

// FailedPrecondition for a step of several tasks in which every process would think itself rank 0
// of 1, with what to change.
absl::Status CheckLauncher(const LauncherFacts& launcher, int world_size);

// Owns MPI's initialisation. Made once by main, which gives it up last.
class Bootstrap {
 public:
  // Without an MPI launcher the world is this process alone and MPI stays out of it.
  static absl::StatusOr<std::unique_ptr<Bootstrap>> Create(double progress_timeout_seconds);
  virtual ~Bootstrap() = default;

  virtual World& world() = 0;
  // Waits for the other ranks, so that no launcher kills a rank that has not printed its error, and
  // finalises.
  virtual void Leave() = 0;
  // Ends the process, and the job, without waiting for anyone.
  [[noreturn]] virtual void Die(int exit_code) = 0;
};

// Name and version of the MPI library, without initialising it.
std::string MpiLibraryVersion();

}  // namespace heddle
