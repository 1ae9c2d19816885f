#include "kernels/cpu/machine_speed.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>

#include "hwy/aligned_allocator.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/machine_speed.cc"
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

using Clock = std::chrono::steady_clock;

constexpr int64_t kMultiplyAddSteps = 1'000'000;  // about 5 ms
constexpr size_t kPiece = size_t{1} << 20;
constexpr size_t kMemoryBytes = size_t{128} << 20;  // several times the last cache of a socket
constexpr Clock::duration kEach = std::chrono::milliseconds(70);

// Keeps the compiler from dropping what has no other use.
std::atomic<float> g_sink;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

double MultiplyAddRate(CpuThreadPool& pool, int num_threads) {
  std::atomic<double> operations{0};
  const Clock::time_point start = Clock::now();
  pool.ParallelRun([&](int thread) {
    if (thread >= num_threads) return;
    float sink;
    const double done = HWY_DYNAMIC_DISPATCH(MultiplyAdd)(kMultiplyAddSteps, &sink);
    g_sink.store(sink, std::memory_order_relaxed);
    operations.fetch_add(done);
  });
  return operations / SecondsSince(start);
}

double ReadRate(CpuThreadPool& pool, std::span<const std::byte> memory) {
  const auto num_pieces = static_cast<int64_t>(memory.size() / kPiece);
  const Clock::time_point start = Clock::now();
  // Pieces are dealt out as tasks, so that a thread that is disturbed does not hold up the rest.
  pool.ParallelFor(num_pieces, [&](int64_t piece) {
    float sink;
    HWY_DYNAMIC_DISPATCH(Read)
    (memory.data() + static_cast<size_t>(piece) * kPiece, kPiece, &sink);
    g_sink.store(sink, std::memory_order_relaxed);
  });
  return static_cast<double>(num_pieces) * kPiece / SecondsSince(start);
}

MachineSpeed MeasureMachine(CpuThreadPool& pool) {
  const auto memory = hwy::AllocateAligned<std::byte>(kMemoryBytes);
  pool.ParallelFor(kMemoryBytes / kPiece, [&](int64_t piece) {  // gives it pages of its own
    std::memset(memory.get() + static_cast<size_t>(piece) * kPiece, 1, kPiece);
  });
  MachineSpeed speed;
  for (const Clock::time_point end = Clock::now() + kEach; Clock::now() < end;) {
    speed.flops = std::max(speed.flops, MultiplyAddRate(pool, pool.num_threads()));
  }
  for (const Clock::time_point end = Clock::now() + kEach; Clock::now() < end;) {
    speed.read_bytes_per_second =
        std::max(speed.read_bytes_per_second, ReadRate(pool, {memory.get(), kMemoryBytes}));
  }
  return speed;
}

}  // namespace heddle
#endif  // HWY_ONCE
