#include "parallel/link_speed.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

// What a rank receives from each other rank, or sums: a line of the cache, and several slots of the
// shared window.
constexpr int64_t kSmallBytes = 64;
constexpr int64_t kLargeBytes = int64_t{256} << 10;

// Calls of one size: as many as fill the time, but enough for a median, and few enough where a call
// takes next to no time.
constexpr double kSecondsOfCalls = 2e-3;
constexpr int kLeastCalls = 3;
constexpr int kMostCalls = 51;

using Call = absl::FunctionRef<absl::Status()>;

// The largest of the ranks' values, at least a nanosecond.
absl::StatusOr<double> SlowestOf(double seconds, ControlChannel& control) {
  const auto nanoseconds = std::max<int64_t>(1, std::llround(seconds * 1e9));
  ASSIGN_OR_RETURN(const int64_t negated, control.AllReduceMin(-nanoseconds));
  return static_cast<double>(-negated) * 1e-9;
}

absl::StatusOr<double> SecondsOf(Call call, Stream& stream) {
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(call());
  RETURN_IF_ERROR(stream.Synchronize());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

absl::StatusOr<double> AgreedMedian(Call call, World& world, Stream& stream) {
  RETURN_IF_ERROR(SecondsOf(call, stream).status());  // connects, touches memory
  ASSIGN_OR_RETURN(const double own_first, SecondsOf(call, stream));
  // All must make as many calls.
  ASSIGN_OR_RETURN(const double first, SlowestOf(own_first, *world.control));
  std::vector<double> times(
      std::clamp(static_cast<int>(kSecondsOfCalls / first), kLeastCalls, kMostCalls));
  for (double& time : times) {
    ASSIGN_OR_RETURN(time, SecondsOf(call, stream));
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return SlowestOf(times[times.size() / 2], *world.control);
}

// `call` is given bytes of each rank; `moved` of them a rank receives.
absl::StatusOr<CollectiveSpeed> LineThrough(absl::FunctionRef<absl::Status(int64_t bytes)> call,
                                            double moved, World& world, Stream& stream) {
  ASSIGN_OR_RETURN(const double small,
                   AgreedMedian([&] { return call(kSmallBytes); }, world, stream));
  ASSIGN_OR_RETURN(const double large,
                   AgreedMedian([&] { return call(kLargeBytes); }, world, stream));
  // A disturbed small call must not make bytes free, or cost less than nothing.
  const double seconds = std::max(large - small, large / 2);
  return CollectiveSpeed{.latency_seconds = small,
                         .bytes_per_second = moved * (kLargeBytes - kSmallBytes) / seconds};
}

}  // namespace

absl::StatusOr<CollectiveSpeed> MeasureAllReduce(World& world, Backend& backend, Stream& stream) {
  const double ranks = world.self.size;
  CHECK_GT(world.self.size, 1);
  ASSIGN_OR_RETURN(const DeviceBuffer data, backend.Allocate(kLargeBytes));
  RETURN_IF_ERROR(backend.MemsetAsync(data.data(), 0, kLargeBytes, stream));
  const auto call = [&](int64_t bytes) {
    return world.communicator->AllReduce(data.data(), bytes / static_cast<int64_t>(sizeof(float)),
                                         DType::kFloat32, ReduceOp::kSum, stream);
  };
  return LineThrough(call, 2 * (ranks - 1) / ranks, world, stream);
}

absl::StatusOr<CollectiveSpeed> MeasureExchange(World& world, int group_size, Backend& backend,
                                                Stream& stream) {
  const int size = world.self.size, rank = world.self.rank;
  CHECK(group_size > 1 && size % group_size == 0) << group_size << " of " << size << " ranks";
  // The large call is as large in every group.
  ASSIGN_OR_RETURN(const DeviceBuffer sent, backend.Allocate(kLargeBytes));
  ASSIGN_OR_RETURN(const DeviceBuffer received, backend.Allocate(kLargeBytes));
  RETURN_IF_ERROR(backend.MemsetAsync(sent.data(), 0, kLargeBytes, stream));
  std::vector<int64_t> bytes_of_rank(size);
  const auto call = [&](int64_t bytes) {
    for (int r = 0; r < size; ++r) {
      const bool is_peer = r != rank && r / group_size == rank / group_size;
      bytes_of_rank[r] = is_peer ? std::max<int64_t>(1, bytes / (group_size - 1)) : 0;
    }
    return world.communicator->AllToAllV(sent.data(), bytes_of_rank, received.data(), bytes_of_rank,
                                         stream);
  };
  return LineThrough(call, 1, world, stream);
}

}  // namespace heddle
