#include "launch/bootstrap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace heddle {
namespace {

using ::testing::HasSubstr;

TEST(Launcher, AStepOfManyTasksThatSeesOneRankIsRefused) {
  LauncherFacts launcher;
  launcher.slurm_step_tasks = 4;
  launcher.slurm_step_id = "0";
  launcher.description = "srun without PMIx";
  const absl::Status refused = CheckLauncher(launcher, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("4 tasks"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--mpi=pmix"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("MPI: " + MpiLibraryVersion()));
  EXPECT_TRUE(CheckLauncher(launcher, 4).ok());
}

TEST(Launcher, MpirunOfOneRankInsideAStepIsFine) {
  LauncherFacts launcher;
  launcher.under_mpi = true;
  launcher.slurm_step_tasks = 2;  // of the daemons
  launcher.description = "mpirun, rank 0 of 1";
  EXPECT_TRUE(CheckLauncher(launcher, 1).ok());
}

TEST(Launcher, IsReadFromTheEnvironment) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"}) {
    unsetenv(name);
  }
  setenv("SLURM_STEP_ID", "3", 1);
  setenv("SLURM_STEP_NUM_TASKS", "2", 1);
  LauncherFacts launcher = ReadLauncher();
  EXPECT_FALSE(launcher.under_mpi);
  EXPECT_EQ(launcher.slurm_step_tasks, 2);
  EXPECT_FALSE(CheckLauncher(launcher, 1).ok());
  setenv("PMIX_RANK", "1", 1);
  launcher = ReadLauncher();
  EXPECT_TRUE(launcher.under_mpi);
  EXPECT_THAT(launcher.description, HasSubstr("PMIx, rank 1"));
}

TEST(Launcher, AProcessAloneIsAWorldOfOne) {
  for (const char* name : {"PMIX_RANK", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}) unsetenv(name);
  const auto bootstrap = Bootstrap::Create(10);
  ASSERT_TRUE(bootstrap.ok()) << bootstrap.status();
  EXPECT_EQ((*bootstrap)->world().self.size, 1);
  (*bootstrap)->Leave();
}

}  // namespace
}  // namespace heddle
