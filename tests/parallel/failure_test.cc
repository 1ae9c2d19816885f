// How a job ends when one of its rank threads fails, stalls or leaves.
#include <chrono>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/host_world.h"
#include "parallel/thread_world.h"

namespace heddle {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

absl::Status AllReduceOnce(World& world, CpuStreamMode mode = CpuStreamMode::kImmediate) {
  const auto backend = CreateCpuBackend({.num_threads = 1, .stream_mode = mode});
  ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
  float x[100] = {1};
  RETURN_IF_ERROR(world.communicator->AllReduce(x, 100, DType::kFloat32, ReduceOp::kSum, *stream));
  return stream->Synchronize();
}

// Does nothing that peers would see, until the job is over.
absl::Status Stall(World& world) {
  while (world.control->abort_status().ok()) std::this_thread::sleep_for(milliseconds(5));
  return world.control->abort_status();
}

// (ranks, ranks a node; 0: all on one)
class FailureTest : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }

  // Runs the job and keeps what it printed and how long it took.
  std::vector<absl::Status> Run(double timeout_seconds,
                                const std::function<absl::Status(World&)>& body) {
    auto world = ThreadWorld::Create({.size = size(),
                                      .ranks_per_node = std::get<1>(GetParam()),
                                      .progress_timeout_seconds = timeout_seconds});
    EXPECT_TRUE(world.ok()) << world.status();
    const auto start = steady_clock::now();
    testing::internal::CaptureStderr();
    std::vector<absl::Status> statuses = (*world)->Run(body);
    printed_ = testing::internal::GetCapturedStderr();
    seconds_ = std::chrono::duration<double>(steady_clock::now() - start).count();
    return statuses;
  }

  std::string printed_;
  double seconds_ = 0;
};

TEST_P(FailureTest, TheFirstErrorReachesAllRanksAndStderrOnce) {
  const int culprit = size() - 1;
  const auto statuses = Run(60, [&](World& world) {
    RETURN_IF_ERROR(AllReduceOnce(world));
    if (world.self.rank == culprit) return absl::DataLossError("layer 3 is missing");
    return AllReduceOnce(world);
  });
  for (int r = 0; r < size(); ++r) {
    EXPECT_EQ(statuses[r].code(), absl::StatusCode::kDataLoss) << statuses[r];
    if (r == culprit) continue;
    EXPECT_THAT(std::string(statuses[r].message()),
                AllOf(HasSubstr("rank " + std::to_string(culprit)), HasSubstr("(node"),
                      HasSubstr("layer 3 is missing")));
  }
  EXPECT_LT(seconds_, 5);
  const size_t first = printed_.find("layer 3 is missing");
  EXPECT_NE(first, std::string::npos);
  EXPECT_EQ(printed_.find("layer 3 is missing", first + 1), std::string::npos) << printed_;
}

TEST_P(FailureTest, EveryKindOfWaitEnds) {
  const auto fails = [&](const std::function<absl::Status(World&)>& wait) {
    const auto statuses = Run(60, [&](World& world) {
      if (world.self.rank != 0) return wait(world);
      std::this_thread::sleep_for(milliseconds(20));
      return absl::InternalError("broken on purpose");
    });
    for (int r = 1; r < size(); ++r) {
      EXPECT_THAT(std::string(statuses[r].message()), HasSubstr("broken on purpose"));
    }
    EXPECT_LT(seconds_, 5);
  };
  fails([](World& world) { return AllReduceOnce(world, CpuStreamMode::kDeferred); });
  fails([](World& world) {
    std::string plan;
    return world.control->Broadcast(plan);
  });
  fails([](World& world) { return world.control->Barrier(); });
  fails([](World& world) { return world.control->AllReduceMin(1).status(); });
  fails([](World& world) { return world.communicator->Split(0, 0).status(); });
  fails([](World& world) -> absl::Status {
    const auto backend = CreateCpuBackend({});
    ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
    std::vector<char> bytes(1 << 20);
    RETURN_IF_ERROR(world.communicator->Send(bytes.data(), bytes.size(), 0, *stream));
    return stream->Synchronize();
  });
}

TEST_P(FailureTest, AStalledRankIsNamed) {
  const auto statuses = Run(1, [](World& world) {
    RETURN_IF_ERROR(AllReduceOnce(world));
    return world.self.rank == 1 ? Stall(world) : AllReduceOnce(world);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 (node"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("has made no progress"));
  }
  EXPECT_THAT(printed_, HasSubstr("rank 1 (node"));
  EXPECT_GT(seconds_, 1);
  EXPECT_LT(seconds_, 1 + 5);
}

TEST_P(FailureTest, ARankThatLeavesEarlyIsNamed) {
  const auto statuses = Run(60, [](World& world) {
    return world.self.rank == 1 ? absl::OkStatus() : AllReduceOnce(world);
  });
  for (int r = 0; r < size(); ++r) {
    if (r == 1) continue;
    EXPECT_EQ(statuses[r].code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(statuses[r].message()), HasSubstr("rank 1"));
    EXPECT_THAT(std::string(statuses[r].message()), HasSubstr("has left the job"));
  }
  EXPECT_LT(seconds_, 2 + 5);
}

TEST_P(FailureTest, CallsThatDoNotMatchAreDescribed) {
  const auto statuses = Run(1, [](World& world) {
    return world.self.rank == 0 ? world.control->Barrier() : AllReduceOnce(world);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(status.message()), HasSubstr("do not agree on what comes next"));
    EXPECT_THAT(std::string(status.message()), AnyOf(HasSubstr("Barrier"), HasSubstr("AllReduce")));
  }
  EXPECT_LT(seconds_, 1 + 5);
}

TEST_P(FailureTest, AnIdleCoordinatorTimesNobodyOut) {
  const auto statuses = Run(1, [](World& world) {
    std::string plan = "plan";
    if (world.self.rank == 0) {
      const IdleScope idle(*world.control);
      std::this_thread::sleep_for(milliseconds(1500));
    }
    RETURN_IF_ERROR(world.control->Broadcast(plan));
    RETURN_IF_ERROR(AllReduceOnce(world));
    return world.control->Barrier();
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(printed_, "");
}

TEST_P(FailureTest, ALongComputationThatReportsTimesNobodyOut) {
  const auto statuses = Run(1, [](World& world) {
    for (int layer = 0; layer < 15 && world.self.rank == 1; ++layer) {
      std::this_thread::sleep_for(milliseconds(100));
      world.control->ReportProgress();
    }
    return AllReduceOnce(world);
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Layouts, FailureTest, testing::Values(std::tuple(3, 0), std::tuple(5, 2)));

TEST(FailureTest, ARankThatNeverJoinsIsNamed) {
  auto threads = ThreadWorld::Create({.size = 2, .progress_timeout_seconds = 0.5});
  ASSERT_TRUE(threads.ok());
  World world = (*threads)->Join(0);
  const absl::Status status = AllReduceOnce(world);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 (node0) has not joined"));
}

TEST(FailureTest, OnlyTheFirstAbortCounts) {
  auto threads = ThreadWorld::Create({.size = 2});
  ASSERT_TRUE(threads.ok());
  World first = (*threads)->Join(0), second = (*threads)->Join(1);
  EXPECT_TRUE(first.control->abort_status().ok());
  second.control->Abort(absl::NotFoundError("no weights"));
  first.control->Abort(absl::InternalError("something later"));
  for (World* world : {&first, &second}) {
    EXPECT_EQ(world->control->abort_status(), absl::NotFoundError("rank 1 (node0): no weights"));
  }
}

TEST(FailureTest, ALoneRankReportsItsError) {
  auto threads = ThreadWorld::Create({.size = 1});
  ASSERT_TRUE(threads.ok());
  testing::internal::CaptureStderr();
  World world = (*threads)->Join(0);
  world.control->Abort(absl::NotFoundError("no weights"));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("no weights"));
  std::string plan = "x";
  EXPECT_FALSE(world.control->Broadcast(plan).ok());
}

TEST(FailureTest, ALongErrorTextIsCut) {
  auto threads = ThreadWorld::Create({.size = 2, .ranks_per_node = 1});
  ASSERT_TRUE(threads.ok());
  testing::internal::CaptureStderr();
  World first = (*threads)->Join(0), second = (*threads)->Join(1);
  second.control->Abort(absl::NotFoundError(std::string(100'000, 'x')));
  const absl::Status status = AllReduceOnce(first);
  EXPECT_LT(testing::internal::GetCapturedStderr().size(), 2000u);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("xxxxxxxxxx"));
}

TEST(FailureTest, TooLittleSharedMemorySaysWhatToChange) {
  EXPECT_TRUE(CheckSharedMemoryRoom(64 << 20, 64 << 20).ok());
  const absl::Status status = CheckSharedMemoryRoom(64 << 20, 100 << 20);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("need 100.0 MiB"), HasSubstr("64.0 MiB free"), HasSubstr("--shm-size")));
}

}  // namespace
}  // namespace heddle
