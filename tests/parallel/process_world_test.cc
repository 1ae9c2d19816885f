// Ranks as processes that share memory, without a launcher that would end the job by itself: what
// the ranks notice when one of them is killed or stopped.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "parallel/host_world.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

constexpr int kNumRanks = 3;
constexpr size_t kTextBytes = 512;

std::shared_ptr<void> SharedMemory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(memory, MAP_FAILED);
  return {memory, [bytes](void* m) { munmap(m, bytes); }};
}

struct Outcome {
  std::string text[kNumRanks];  // of each rank's status; empty if it did not get that far
  double seconds = 0;           // until the last rank but the stopped ended
};

// Forks the ranks and runs `body` in each. `faulty` is killed once the others have ended.
Outcome RunProcesses(double timeout_seconds, int faulty,
                     const std::function<absl::Status(World& world)>& body) {
  std::vector<RankPlace> places;
  for (int r = 0; r < kNumRanks; ++r) places.push_back({0, r, "here"});
  const std::shared_ptr<void> window = SharedMemory(HostWindowBytes(places, 0));
  FormatHostWindow(window.get(), places, 0);
  const std::shared_ptr<void> texts = SharedMemory(kNumRanks * kTextBytes);
  const auto text_of = [&](int rank) {
    return static_cast<char*>(texts.get()) + rank * kTextBytes;
  };

  const auto start = std::chrono::steady_clock::now();
  pid_t pids[kNumRanks];
  for (int rank = 0; rank < kNumRanks; ++rank) {
    pids[rank] = fork();
    if (pids[rank] != 0) continue;
    absl::Status status;
    {
      World world = MakeHostWorld(rank, places, window, nullptr,
                                  {.progress_timeout_seconds = timeout_seconds, .yields = true});
      status = body(world);
      if (!status.ok()) world.control->Abort(status);
      std::strncpy(text_of(rank), std::string(status.message()).c_str(), kTextBytes - 1);
    }
    _exit(status.ok() ? 0 : 1);
  }
  Outcome outcome;
  for (int running = kNumRanks; running > 0; --running) {
    int state = 0;
    const pid_t ended = waitpid(-1, &state, 0);
    outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (ended == pids[faulty]) continue;
    if (running == 2) kill(pids[faulty], SIGKILL);
  }
  for (int rank = 0; rank < kNumRanks; ++rank) outcome.text[rank] = text_of(rank);
  return outcome;
}

absl::Status Steps(World& world, int faulty, int signal) {
  for (int step = 0;; ++step) {
    if (step == 10 && world.self.rank == faulty) raise(signal);
    const absl::Status status = world.control->Barrier();
    if (!status.ok()) return status;
  }
}

class ProcessWorldTest : public testing::TestWithParam<int> {};

TEST_P(ProcessWorldTest, AKilledRankIsNoticedWithinSeconds) {
  const int faulty = GetParam();
  const Outcome outcome =
      RunProcesses(60, faulty, [&](World& world) { return Steps(world, faulty, SIGKILL); });
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (rank == faulty) continue;
    EXPECT_THAT(outcome.text[rank],
                HasSubstr("rank " + std::to_string(faulty) + " (here) has died"));
  }
  EXPECT_LT(outcome.seconds, 5);
}

TEST_P(ProcessWorldTest, AStoppedRankIsNoticedAfterTheTimeout) {
  const int faulty = GetParam();
  const Outcome outcome =
      RunProcesses(1, faulty, [&](World& world) { return Steps(world, faulty, SIGSTOP); });
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (rank == faulty) continue;
    EXPECT_THAT(outcome.text[rank],
                HasSubstr("rank " + std::to_string(faulty) + " (here) has shown no sign of life"));
  }
  EXPECT_GT(outcome.seconds, 1);
  EXPECT_LT(outcome.seconds, 1 + 5);
}

// Rank 0, which also reports, and another.
INSTANTIATE_TEST_SUITE_P(Ranks, ProcessWorldTest, testing::Values(0, 1));

}  // namespace
}  // namespace heddle
