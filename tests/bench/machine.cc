#include "tests/bench/machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/base/logging.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/machine.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int kChains = 12;  // of multiply-adds: latency 4, two a cycle, and some to spare

// Does `count` steps of kChains multiply-adds; returns the operations done.
double MultiplyAdd(int64_t count, float* sink) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V a = hn::Set(d, 0.999f), b = hn::Set(d, 0.001f);
  // Chains differ, or the compiler would see that they are one.
  const V one = hn::Set(d, 1.0f);
  V c0 = one, c1 = c0 + one, c2 = c1 + one, c3 = c2 + one, c4 = c3 + one, c5 = c4 + one;
  V c6 = c5 + one, c7 = c6 + one, c8 = c7 + one, c9 = c8 + one, c10 = c9 + one, c11 = c10 + one;
  for (int64_t i = 0; i < count; ++i) {
    c0 = hn::MulAdd(c0, a, b);
    c1 = hn::MulAdd(c1, a, b);
    c2 = hn::MulAdd(c2, a, b);
    c3 = hn::MulAdd(c3, a, b);
    c4 = hn::MulAdd(c4, a, b);
    c5 = hn::MulAdd(c5, a, b);
    c6 = hn::MulAdd(c6, a, b);
    c7 = hn::MulAdd(c7, a, b);
    c8 = hn::MulAdd(c8, a, b);
    c9 = hn::MulAdd(c9, a, b);
    c10 = hn::MulAdd(c10, a, b);
    c11 = hn::MulAdd(c11, a, b);
  }
  const V sum = ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7)) + ((c8 + c9) + (c10 + c11));
  *sink = hn::GetLane(sum);
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(count);
}

// Reads `bytes` in four streams, as a kernel that is bound by memory would.
void Read(const std::byte* data, size_t bytes, float* sink) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  constexpr size_t kStep = 64, kAhead = 1024;
  const size_t stream = bytes / 4 / kStep * kStep;
  V sum = hn::Zero(d);
  for (size_t i = 0; i < stream; i += kStep) {
    for (size_t s = 0; s < 4; ++s) {
      const std::byte* line = data + s * stream + i;
      hwy::Prefetch(line + kAhead);
      for (size_t j = 0; j < kStep; j += hn::Lanes(d) * sizeof(float)) {
        sum = hn::Or(sum, hn::Load(d, reinterpret_cast<const float*>(line + j)));
      }
    }
  }
  *sink = hn::GetLane(sum);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
namespace {

HWY_EXPORT(MultiplyAdd);
HWY_EXPORT(Read);

constexpr int64_t kMultiplyAddSteps = 1'000'000;    // about 5 ms
constexpr size_t kMemoryBytes = size_t{256} << 20;  // many times the last cache

// Keeps the compiler from dropping what has no other use.
std::atomic<float> g_sink;

void RunOnPool(Stream& stream, absl::FunctionRef<void(CpuThreadPool&)> work) {
  CpuStream::From(stream).Enqueue([&](CpuThreadPool& pool) {
    work(pool);
    return absl::OkStatus();
  });
  CHECK_OK(stream.Synchronize());
}

// Operations a second of the first `num_threads` threads of the pool.
double MultiplyAddRate(CpuThreadPool& pool, int num_threads) {
  std::atomic<double> operations{0};
  const double seconds = Seconds([&] {
    pool.ParallelRun([&](int thread) {
      if (thread >= num_threads) return;
      float sink;
      const double done = HWY_DYNAMIC_DISPATCH(MultiplyAdd)(kMultiplyAddSteps, &sink);
      g_sink.store(sink, std::memory_order_relaxed);
      operations.fetch_add(done);
    });
  });
  return operations / seconds;
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
  double seconds = 0;
  RunOnPool(stream_, [&](CpuThreadPool& pool) {
    // Pieces are dealt out as tasks, so that a thread that is disturbed does not hold up the rest.
    constexpr size_t kPiece = size_t{1} << 20;
    seconds = Seconds([&] {
      pool.ParallelFor(kMemoryBytes / kPiece, [&](int64_t piece) {
        float sink;
        HWY_DYNAMIC_DISPATCH(Read)
        (memory_.as<std::byte>() + static_cast<size_t>(piece) * kPiece, kPiece, &sink);
        g_sink.store(sink, std::memory_order_relaxed);
      });
    });
  });
  return static_cast<double>(kMemoryBytes) / seconds;
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
#endif
