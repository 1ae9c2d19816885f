#include "launch/bootstrap.h"

#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "parallel/thread_world.h"
#include "parallel/world_mpi.h"

namespace heddle {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

int EnvironmentInt(const char* name) {
  int value = 0;
  return absl::SimpleAtoi(Environment(name), &value) ? value : 0;
}

// One process, one rank.
class AloneBootstrap : public Bootstrap {
 public:
  static absl::StatusOr<std::unique_ptr<Bootstrap>> Create(double progress_timeout_seconds) {
    auto bootstrap = std::make_unique<AloneBootstrap>();
    ThreadWorldOptions options;
    options.progress_timeout_seconds = progress_timeout_seconds;
    ASSIGN_OR_RETURN(bootstrap->threads_, ThreadWorld::Create(options));
    bootstrap->world_ = bootstrap->threads_->Join(0);
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    bootstrap->world_.self.host = host;
    return bootstrap;
  }

  World& world() override { return world_; }
  void Leave() override { world_ = World(); }
  void Die(int exit_code) override {
    std::fflush(nullptr);
    _exit(exit_code);
  }

 private:
  std::unique_ptr<ThreadWorld> threads_;
  World world_;
};

class MpiBootstrap : public Bootstrap {
 public:
  static absl::StatusOr<std::unique_ptr<Bootstrap>> Create(const LauncherFacts& launcher,
                                                           double progress_timeout_seconds) {
    int provided = 0;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS) {
      return absl::UnavailableError(
          absl::StrCat("MPI_Init_thread failed; library: ", MpiLibraryVersion(),
                       "; launcher: ", launcher.description));
    }
    auto bootstrap = std::make_unique<MpiBootstrap>();
    int size = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const absl::Status launched = CheckLauncher(launcher, size);
    if (!launched.ok()) {
      MPI_Finalize();
      return launched;
    }
    MpiWorldOptions options;
    options.progress_timeout_seconds = progress_timeout_seconds;
    // Tests of the links between nodes run them on one machine.
    options.ranks_per_node = EnvironmentInt("HEDDLE_TEST_RANKS_PER_NODE");
    ASSIGN_OR_RETURN(bootstrap->world_, JoinMpiWorld(options));
    return bootstrap;
  }

  World& world() override { return world_; }

  void Leave() override {
    world_.control->Barrier().IgnoreError();
    world_ = World();
    MPI_Finalize();
  }

  void Die(int exit_code) override {
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
  }

 private:
  World world_;
};

}  // namespace

LauncherFacts ReadLauncher() {
  LauncherFacts facts;
  facts.slurm_step_id = Environment("SLURM_STEP_ID");
  facts.slurm_step_tasks = EnvironmentInt("SLURM_STEP_NUM_TASKS");
  const bool mpirun = !Environment("OMPI_COMM_WORLD_SIZE").empty();
  const bool pmix = !Environment("PMIX_RANK").empty();
  facts.under_mpi = mpirun || pmix;
  if (mpirun) {
    facts.description = absl::StrCat("mpirun, rank ", Environment("OMPI_COMM_WORLD_RANK"), " of ",
                                     Environment("OMPI_COMM_WORLD_SIZE"));
  } else if (pmix) {
    facts.description = absl::StrCat("PMIx, rank ", Environment("PMIX_RANK"));
  } else if (!facts.slurm_step_id.empty()) {
    facts.description = "srun without PMIx";
  } else {
    facts.description = "none";
  }
  return facts;
}

absl::Status CheckLauncher(const LauncherFacts& launcher, int world_size) {
  if (launcher.slurm_step_tasks > 1 && world_size == 1 &&
      launcher.description.rfind("mpirun", 0) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this Slurm step has ", launcher.slurm_step_tasks,
        " tasks, but MPI sees one rank: every process would think itself rank 0 of 1. Launch with "
        "srun --mpi=pmix (launcher: ",
        launcher.description, "; MPI: ", MpiLibraryVersion(), ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Bootstrap>> Bootstrap::Create(double progress_timeout_seconds) {
  const LauncherFacts launcher = ReadLauncher();
  if (!launcher.under_mpi) {
    RETURN_IF_ERROR(CheckLauncher(launcher, 1));
    return AloneBootstrap::Create(progress_timeout_seconds);
  }
  return MpiBootstrap::Create(launcher, progress_timeout_seconds);
}

std::string MpiLibraryVersion() {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  std::string text(version, static_cast<size_t>(length));
  return text.substr(0, text.find(','));
}

}  // namespace heddle
