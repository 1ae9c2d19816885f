#include "parallel/startup_check.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/thread_world.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::Status Check(World& world, CpuStreamMode mode = CpuStreamMode::kImmediate,
                   double deadline_seconds = 60) {
  const auto backend = CreateCpuBackend({.num_threads = 1, .stream_mode = mode});
  ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
  return CheckAllReduce(world, *backend, *stream, deadline_seconds);
}

std::vector<absl::Status> OnRanks(const ThreadWorldOptions& options,
                                  const std::function<absl::Status(World&)>& body) {
  return (*ThreadWorld::Create(options))->Run(body);
}

// Sums of one size come out with a wrong element, as from a page that went to the wrong place.
class FaultyCommunicator : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> good, int64_t faulty_count)
      : good_(std::move(good)), faulty_count_(faulty_count) {}

  int rank() const override { return good_->rank(); }
  int size() const override { return good_->size(); }
  absl::Status AllReduce(void* data, int64_t count, DType dtype, ReduceOp op,
                         Stream& stream) override {
    RETURN_IF_ERROR(good_->AllReduce(data, count, dtype, op, stream));
    if (count == faulty_count_) static_cast<float*>(data)[count - 1] += 1;
    return absl::OkStatus();
  }
  absl::Status AllGatherV(const void* input, void* output, std::span<const int64_t> bytes_per_rank,
                          Stream& stream) override {
    return good_->AllGatherV(input, output, bytes_per_rank, stream);
  }
  absl::Status ReduceScatterV(const void* input, void* output,
                              std::span<const int64_t> count_per_rank, DType dtype,
                              Stream& stream) override {
    return good_->ReduceScatterV(input, output, count_per_rank, dtype, stream);
  }
  absl::Status AllToAllV(const void* input, std::span<const int64_t> send_bytes, void* output,
                         std::span<const int64_t> receive_bytes, Stream& stream) override {
    return good_->AllToAllV(input, send_bytes, output, receive_bytes, stream);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root, Stream& stream) override {
    return good_->Broadcast(data, bytes, root, stream);
  }
  absl::Status Send(const void* data, int64_t bytes, int peer, Stream& stream) override {
    return good_->Send(data, bytes, peer, stream);
  }
  absl::Status Recv(void* data, int64_t bytes, int peer, Stream& stream) override {
    return good_->Recv(data, bytes, peer, stream);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    return good_->Split(color, key);
  }

 private:
  std::unique_ptr<Communicator> good_;
  const int64_t faulty_count_;
};

TEST(StartupCheck, PassesOnAnyNumberOfRanksAndNodes) {
  for (const CpuStreamMode mode : {CpuStreamMode::kImmediate, CpuStreamMode::kDeferred}) {
    for (const int size : {1, 2, 3, 8}) {
      for (const int ranks_per_node : {0, 1, 2}) {
        for (const absl::Status& status :
             OnRanks({.size = size, .ranks_per_node = ranks_per_node},
                     [mode](World& world) { return Check(world, mode); })) {
          EXPECT_TRUE(status.ok()) << status;
        }
      }
    }
  }
}

TEST(StartupCheck, AWrongSumNamesTheSizeAndTheElement) {
  for (const int64_t count : {1, 20'000}) {
    testing::internal::CaptureStderr();
    const auto statuses = OnRanks({.size = 3}, [count](World& world) {
      if (world.self.rank == 1) {
        world.communicator =
            std::make_unique<FaultyCommunicator>(std::move(world.communicator), count);
      }
      RETURN_IF_ERROR(Check(world));
      return world.control->Barrier();
    });
    EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("rank 1"));
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("AllReduce of " + std::to_string(count) + " floats"),
                        HasSubstr("element " + std::to_string(count - 1))));
    }
  }
}

TEST(StartupCheck, SumsThatDoNotComeEndTheJob) {
  const auto start = std::chrono::steady_clock::now();
  testing::internal::CaptureStderr();
  const auto statuses = OnRanks({.size = 2}, [](World& world) {
    if (world.self.rank == 0) return Check(world, CpuStreamMode::kImmediate, 0.1);
    while (world.control->abort_status().ok()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return world.control->abort_status();
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("AllReduce of 1 floats"));
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("has not ended within 0.1 s"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace heddle
