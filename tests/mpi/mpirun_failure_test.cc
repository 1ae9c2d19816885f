// Whatever happens to a rank, the job ends in time, says why, and leaves no process behind.
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Outcome {
  int exit_code = 0;
  double seconds = 0;  // of the whole job
  std::string output;  // stdout and stderr
  std::vector<int> pids;
};

// Three ranks of which rank 1 fails.
Outcome RunJob(const std::string& how, double timeout_seconds, int ranks_per_node) {
  const std::string command = absl::StrCat(HEDDLE_MPIEXEC, " -n 3 ", HEDDLE_FAILING_RANK, " ", how,
                                           " ", timeout_seconds, " ", ranks_per_node, " 2>&1");
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  FILE* const job = popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  while (std::fgets(buffer.data(), buffer.size(), job) != nullptr) outcome.output += buffer.data();
  outcome.exit_code = WEXITSTATUS(pclose(job));
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("pid ", 0) == 0) outcome.pids.push_back(std::stoi(line.substr(4)));
  }
  EXPECT_EQ(outcome.pids.size(), 3u) << outcome.output;
  return outcome;
}

// Still runs; one that has ended and that nobody has asked after yet does not.
bool Runs(int pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string stat((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat[name_end + 2] != 'Z' && stat[name_end + 2] != 'X';
}

void ExpectNobodyLeft(const Outcome& outcome) {
  for (const int pid : outcome.pids) {
    // The launcher may end a moment before the ranks it has killed.
    for (int i = 0; i < 100 && Runs(pid); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_FALSE(Runs(pid)) << "process " << pid << " outlives the job";
  }
}

// Start and end of mpirun itself, on a busy machine.
constexpr double kLaunchSeconds = 5;

class MpirunFailureTest : public testing::TestWithParam<int> {};  // ranks that share a host

TEST_P(MpirunFailureTest, AnErrorEndsTheJobWithItsText) {
  const Outcome outcome = RunJob("error", 60, GetParam());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[rank 0 "), HasSubstr("the job ends: rank 1 ("),
                                    HasSubstr("tensor model.norm.weight is missing")));
  EXPECT_LT(outcome.seconds, 5 + kLaunchSeconds);
  ExpectNobodyLeft(outcome);
}

TEST_P(MpirunFailureTest, AKilledRankEndsTheJob) {
  const Outcome outcome = RunJob("kill", 60, GetParam());
  EXPECT_NE(outcome.exit_code, 0);
  // Whoever is faster: the launcher or the ranks beside it.
  EXPECT_THAT(outcome.output, AnyOf(HasSubstr("signal 9"), HasSubstr("has died")));
  EXPECT_LT(outcome.seconds, 5 + kLaunchSeconds);
  ExpectNobodyLeft(outcome);
}

TEST_P(MpirunFailureTest, AnExitEndsTheJob) {
  const Outcome outcome = RunJob("exit", 60, GetParam());
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_LT(outcome.seconds, 5 + kLaunchSeconds);
  ExpectNobodyLeft(outcome);
}

TEST_P(MpirunFailureTest, ARankThatDoesNotJoinIsReportedWithTheInterfaces) {
  const Outcome outcome = RunJob("absent", 2, GetParam());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("has not met all other ranks within 2 s"),
                    HasSubstr("Interfaces here: "), HasSubstr("btl_tcp_if_include=NAME")));
  EXPECT_LT(outcome.seconds, 2 + 5 + kLaunchSeconds);
  ExpectNobodyLeft(outcome);
}

TEST_P(MpirunFailureTest, AStoppedRankEndsTheJobAfterTheTimeout) {
  const Outcome outcome = RunJob("stop", 2, GetParam());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("the job ends: "));
  EXPECT_THAT(outcome.output, AnyOf(HasSubstr("rank 1 ("), HasSubstr("of rank 1")));
  EXPECT_THAT(outcome.output, AnyOf(HasSubstr("no sign of life"), HasSubstr("not been heard of")));
  EXPECT_GT(outcome.seconds, 2);
  EXPECT_LT(outcome.seconds, 2 + 5 + kLaunchSeconds);
  ExpectNobodyLeft(outcome);
}

TEST_P(MpirunFailureTest, AStoppedRankIsNoticedThoughNobodyWaitsForIt) {
  const Outcome outcome = RunJob("stop-unheard", 4, GetParam());
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AnyOf(HasSubstr("no sign of life"), HasSubstr("not been heard of")));
  EXPECT_LT(outcome.seconds, 4 + 5 + kLaunchSeconds);
  ExpectNobodyLeft(outcome);
}

TEST_P(MpirunFailureTest, AStalledRankEndsTheJobAfterTheTimeout) {
  const Outcome outcome = RunJob("stall", 2, GetParam());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("rank 1 ("), HasSubstr("has made no progress for 2")));
  EXPECT_LT(outcome.seconds, 2 + 5 + kLaunchSeconds);
  ExpectNobodyLeft(outcome);
}

INSTANTIATE_TEST_SUITE_P(OneHost, MpirunFailureTest, testing::Values(0));
INSTANTIATE_TEST_SUITE_P(AHostEach, MpirunFailureTest, testing::Values(1));

}  // namespace
