#include "parallel/startup_check.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

// One float; a row of activations; more than a slot of shared memory; more than all of them.
constexpr int64_t kCounts[] = {1, 1000, 20'000, 150'000};

// What rank r contributes to element i. Small whole numbers: their sums are exact in float32.
constexpr int64_t kPeriod = 61;
int64_t Contribution(int rank, int64_t i) { return (rank + i) % kPeriod; }

// Calls `on_expiry` on a thread of its own unless destroyed in time.
class Deadline {
 public:
  Deadline(double seconds, std::function<void()> on_expiry)
      : thread_([this, seconds, on_expiry = std::move(on_expiry)] {
          std::unique_lock<std::mutex> lock(mutex_);
          const auto time = std::chrono::duration<double>(seconds);
          if (!over_.wait_for(lock, time, [this] { return met_; })) on_expiry();
        }) {}
  ~Deadline() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      met_ = true;
    }
    over_.notify_one();
    thread_.join();
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  bool met_ = false;
  std::thread thread_;  // last: it uses the rest
};

absl::Status CheckOneSum(int64_t count, World& world, Backend& backend, Stream& stream) {
  const size_t bytes = count * sizeof(float);
  ASSIGN_OR_RETURN(const DeviceBuffer host, backend.AllocatePinned(bytes));
  ASSIGN_OR_RETURN(const DeviceBuffer device, backend.Allocate(bytes));
  auto* const values = host.as<float>();
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(Contribution(world.self.rank, i));
  }
  RETURN_IF_ERROR(backend.CopyAsync(device.data(), values, bytes, stream));
  RETURN_IF_ERROR(
      world.communicator->AllReduce(device.data(), count, DType::kFloat32, ReduceOp::kSum, stream));
  RETURN_IF_ERROR(backend.CopyAsync(values, device.data(), bytes, stream));
  RETURN_IF_ERROR(stream.Synchronize());

  std::vector<float> expected(kPeriod);  // and again
  for (int64_t i = 0; i < kPeriod; ++i) {
    int64_t sum = 0;
    for (int rank = 0; rank < world.self.size; ++rank) sum += Contribution(rank, i);
    expected[i] = static_cast<float>(sum);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] == expected[i % kPeriod]) continue;
    return absl::DataLossError(
        absl::StrCat("start-up check: AllReduce of ", count, " floats over ", world.self.size,
                     " ranks gave element ", i, " as ", values[i], ", not ", expected[i % kPeriod],
                     ": the memory or the network between the ranks is not to be trusted"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAllReduce(World& world, Backend& backend, Stream& stream,
                            double deadline_seconds) {
  if (world.self.size == 1) return absl::OkStatus();
  for (const int64_t count : kCounts) {
    const Deadline deadline(deadline_seconds, [&world, count, deadline_seconds] {
      world.control->Abort(absl::DeadlineExceededError(absl::StrCat(
          "start-up check: AllReduce of ", count, " floats over ", world.self.size,
          " ranks has not ended within ", deadline_seconds,
          " s: the ranks do not reach each other (of several nodes, see which network they use)")));
    });
    RETURN_IF_ERROR(CheckOneSum(count, world, backend, stream));
  }
  return absl::OkStatus();
}

}  // namespace heddle
