#include "parallel/link_speed.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
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

// Of a step, calls cost what it takes longer with them. Between two calls ranks work, then arrive
// one after the other, and may have gone to sleep; ranks that share a core work in turn. So here
// ranks do rounds of work, some tenths of a millisecond of copies, with and without a call after
// each.
constexpr int kCopiesOfRound = 20;
constexpr double kSecondsOfCalls = 5e-3;
constexpr int kLeastRounds = 3;
constexpr int kMostRounds = 4;
// The second fastest counts: some are disturbed, and in one no rank may have gone to sleep.
constexpr int kRepetitions = 5;

constexpr double kLeastSeconds = 1e-7;  // of a call

using Call = absl::FunctionRef<absl::Status()>;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The largest of the ranks' values, at least a nanosecond.
absl::StatusOr<double> SlowestOf(double seconds, ControlChannel& control) {
  const auto nanoseconds = std::max<int64_t>(1, std::llround(seconds * 1e9));
  ASSIGN_OR_RETURN(const int64_t negated, control.AllReduceMin(-nanoseconds));
  return static_cast<double>(-negated) * 1e-9;
}

// What the calls of one measurement share.
struct Rank {
  World& world;
  Backend& backend;
  Stream& stream;
  DeviceBuffer sent;  // kLargeBytes each
  DeviceBuffer received;
};

absl::StatusOr<Rank> PrepareRank(World& world, Backend& backend, Stream& stream) {
  ASSIGN_OR_RETURN(DeviceBuffer sent, backend.Allocate(kLargeBytes));
  ASSIGN_OR_RETURN(DeviceBuffer received, backend.Allocate(kLargeBytes));
  RETURN_IF_ERROR(backend.MemsetAsync(sent.data(), 0, kLargeBytes, stream));
  return Rank{world, backend, stream, std::move(sent), std::move(received)};
}

absl::Status DoRounds(int rounds, Call call, const Rank& rank) {
  for (int round = 0; round < rounds; ++round) {
    for (int copy = 0; copy < kCopiesOfRound; ++copy) {
      RETURN_IF_ERROR(
          rank.backend.CopyAsync(rank.received.data(), rank.sent.data(), kLargeBytes, rank.stream));
    }
    RETURN_IF_ERROR(call());
    RETURN_IF_ERROR(rank.stream.Synchronize());
  }
  return absl::OkStatus();
}

// Seconds of a round, from when all ranks begin until all are done.
absl::StatusOr<double> SecondsOfRound(int rounds, Call call, const Rank& rank) {
  ControlChannel& control = *rank.world.control;
  std::array<double, kRepetitions> times;
  for (double& time : times) {
    RETURN_IF_ERROR(control.Barrier());
    const Clock::time_point start = Clock::now();
    RETURN_IF_ERROR(DoRounds(rounds, call, rank));
    RETURN_IF_ERROR(control.Barrier());
    ASSIGN_OR_RETURN(time, SlowestOf(SecondsSince(start), control));
  }
  std::sort(times.begin(), times.end());
  return times[1] / rounds;
}

// What a call that moves `bytes` adds to a round. Noise may hide a short one, but none is faster
// than a copy of its bytes.
absl::StatusOr<double> SecondsOfCall(Call call, int64_t bytes, const Rank& rank) {
  RETURN_IF_ERROR(DoRounds(1, call, rank));  // connects, touches memory
  const Clock::time_point start = Clock::now();
  RETURN_IF_ERROR(DoRounds(1, call, rank));
  // All must make as many calls.
  ASSIGN_OR_RETURN(const double first, SlowestOf(SecondsSince(start), *rank.world.control));
  const int rounds = std::max(
      static_cast<int>(std::min<double>(kSecondsOfCalls / first, kMostRounds)), kLeastRounds);
  ASSIGN_OR_RETURN(const double without, SecondsOfRound(
                                             rounds, [] { return absl::OkStatus(); }, rank));
  ASSIGN_OR_RETURN(const double with, SecondsOfRound(rounds, call, rank));
  const double copy = without / kCopiesOfRound * static_cast<double>(bytes) / kLargeBytes;
  return std::max({with - without, copy, kLeastSeconds});
}

// `call` is given bytes of each rank, which receives `received` times as many.
absl::StatusOr<CollectiveSpeed> LineThrough(absl::FunctionRef<absl::Status(int64_t bytes)> call,
                                            double received, const Rank& rank) {
  const auto seconds_of = [&](int64_t bytes) {
    return SecondsOfCall([&] { return call(bytes); }, bytes, rank);
  };
  ASSIGN_OR_RETURN(const double small, seconds_of(kSmallBytes));
  ASSIGN_OR_RETURN(const double large, seconds_of(kLargeBytes));
  // A disturbed small call must not make bytes free, or cost less than nothing.
  const double seconds = std::max(large - small, large / 2);
  return CollectiveSpeed{.latency_seconds = small,
                         .bytes_per_second = received * (kLargeBytes - kSmallBytes) / seconds};
}

}  // namespace

absl::StatusOr<CollectiveSpeed> MeasureAllReduce(World& world, Backend& backend, Stream& stream) {
  const double ranks = world.self.size;
  CHECK_GT(world.self.size, 1);
  ASSIGN_OR_RETURN(const Rank rank, PrepareRank(world, backend, stream));
  const auto call = [&](int64_t bytes) {
    return world.communicator->AllReduce(rank.sent.data(),
                                         bytes / static_cast<int64_t>(sizeof(float)),
                                         DType::kFloat32, ReduceOp::kSum, stream);
  };
  return LineThrough(call, 2 * (ranks - 1) / ranks, rank);
}

absl::StatusOr<CollectiveSpeed> MeasureExchange(World& world, int group_size, Backend& backend,
                                                Stream& stream) {
  const int size = world.self.size, self = world.self.rank;
  CHECK(group_size > 1 && size % group_size == 0) << group_size << " of " << size << " ranks";
  ASSIGN_OR_RETURN(const Rank rank, PrepareRank(world, backend, stream));
  std::unique_ptr<Communicator> split;
  if (group_size < size) {
    ASSIGN_OR_RETURN(split, world.communicator->Split(self / group_size, self));
  }
  Communicator& group = split != nullptr ? *split : *world.communicator;
  std::vector<int64_t> bytes_of_rank(group_size);
  const auto call = [&](int64_t bytes) {
    const int64_t share = std::max<int64_t>(1, bytes / (group_size - 1));
    std::fill(bytes_of_rank.begin(), bytes_of_rank.end(), share);
    bytes_of_rank[group.rank()] = 0;
    return group.AllToAllV(rank.sent.data(), bytes_of_rank, rank.received.data(), bytes_of_rank,
                           stream);
  };
  return LineThrough(call, 1, rank);
}

}  // namespace heddle
