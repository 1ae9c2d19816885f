#include "parallel/host_reduce.h"

#include <algorithm>

#include "kernels/base/logging.h"

namespace heddle {
namespace {

constexpr int64_t kBlock = 1024;  // floats that stay in the first-level cache

struct Sum {
  static float Combine(float a, float b) { return a + b; }
};

struct Max {
  // A NaN on either side stays.
  static float Combine(float a, float b) { return a > b || a != a ? a : b; }
};

// __restrict is kept away from `out`: it may be `a` or `b` itself.
template <typename Op>
void CombineRows(const float* a, const float* b, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = Op::Combine(a[i], b[i]);
}

template <typename Op>
void Reduce(std::span<const float* const> sources, int64_t count, float* out) {
  if (sources.size() == 1) {
    if (sources[0] != out) std::copy_n(sources[0], count, out);
    return;
  }
  if (sources.size() == 2) return CombineRows<Op>(sources[0], sources[1], count, out);
  // `out` is written last, since it may be a source that comes later.
  float block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    CombineRows<Op>(sources[0] + begin, sources[1] + begin, n, block);
    for (size_t s = 2; s + 1 < sources.size(); ++s) {
      CombineRows<Op>(block, sources[s] + begin, n, block);
    }
    CombineRows<Op>(block, sources.back() + begin, n, out + begin);
  }
}

}  // namespace

void ReduceInOrder(std::span<const float* const> sources, int64_t count, ReduceOp op, float* out) {
  CHECK(!sources.empty());
  if (op == ReduceOp::kSum) {
    Reduce<Sum>(sources, count, out);
  } else {
    Reduce<Max>(sources, count, out);
  }
}

}  // namespace heddle
