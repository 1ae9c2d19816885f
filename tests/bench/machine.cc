#include "tests/bench/machine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/base/logging.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/machine_speed.h"

namespace heddle {
namespace {

constexpr size_t kMemoryBytes = size_t{256} << 20;  // many times the last cache

void RunOnPool(Stream& stream, absl::FunctionRef<void(CpuThreadPool&)> work) {
  CpuStream::From(stream).Enqueue([&](CpuThreadPool& pool) {
    work(pool);
    return absl::OkStatus();
  });
  CHECK_OK(stream.Synchronize());
}

}  // namespace

Machine::Machine(Backend& backend, Stream& stream)
    : stream_(stream), memory_(*backend.Allocate(kMemoryBytes)) {
  std::memset(memory_.data(), 1, kMemoryBytes);  // gives it pages of its own
}

void Machine::Wake() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(5);
  RunOnPool(stream_, [&](CpuThreadPool& pool) {
    for (;;) {
      const double one = MultiplyAddRate(pool, 1);
      const double all = MultiplyAddRate(pool, pool.num_threads());
      if (all >= 0.925 * pool.num_threads() * one) return;
      if (Clock::now() > deadline) {
        std::fprintf(stderr, "%d threads are only %.2f times as fast as one\n", pool.num_threads(),
                     all / one);
        return;
      }
    }
  });
}

double Machine::FlopsPerSecond() {
  double rate = 0;
  RunOnPool(stream_,
            [&](CpuThreadPool& pool) { rate = MultiplyAddRate(pool, pool.num_threads()); });
  return rate;
}

double Machine::ReadBytesPerSecond() {
  double rate = 0;
  RunOnPool(stream_, [&](CpuThreadPool& pool) {
    rate = ReadRate(pool, {memory_.as<std::byte>(), kMemoryBytes});
  });
  return rate;
}

double Seconds(absl::FunctionRef<void()> work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double SecondsPerCall(absl::FunctionRef<void()> work) {
  int calls = 0;
  double seconds = 0;
  for (; seconds < 0.02; ++calls) seconds += Seconds(work);
  return seconds / calls;
}

double Median(int repetitions, absl::FunctionRef<double()> ratio) {
  std::vector<double> ratios(repetitions);
  for (double& value : ratios) value = ratio();
  std::nth_element(ratios.begin(), ratios.begin() + repetitions / 2, ratios.end());
  return ratios[repetitions / 2];
}

void PrintRatio(absl::string_view name, double ratio, double asked) {
  std::printf("%.*s %.3f %.2f\n", static_cast<int>(name.size()), name.data(), ratio, asked);
  std::fflush(stdout);
}

int BenchThreads() { return std::min(2, NumAllowedCpus()); }

}  // namespace heddle
