#include "kernels/norm/rms_norm_cpu.h"

#include <cmath>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/rms_norm_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The order depends on `width` alone: four vectors of partial sums, then the elements left over.
float SumOfSquares(const float* x, int64_t width) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 4 * lanes <= width; i += 4 * lanes) {
    const auto x0 = hn::LoadU(d, x + i), x1 = hn::LoadU(d, x + i + lanes);
    const auto x2 = hn::LoadU(d, x + i + 2 * lanes), x3 = hn::LoadU(d, x + i + 3 * lanes);
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
    sum2 = hn::MulAdd(x2, x2, sum2);
    sum3 = hn::MulAdd(x3, x3, sum3);
  }
  for (; i + lanes <= width; i += lanes) {
    const auto x0 = hn::LoadU(d, x + i);
    sum0 = hn::MulAdd(x0, x0, sum0);
  }
  float rest = 0.0f;
  for (; i < width; ++i) rest += x[i] * x[i];
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  return hn::GetLane(hn::SumOfLanes(d, sum)) + rest;
}

void RmsNormRow(const float* x, const float* weight, float epsilon, float* out, int64_t width) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  const float mean = SumOfSquares(x, width) / static_cast<float>(width);
  const float scale = 1.0f / std::sqrt(mean + epsilon);
  const auto scales = hn::Set(d, scale);
  int64_t i = 0;
  for (; i + lanes <= width; i += lanes) {
    const auto normed = hn::Mul(hn::LoadU(d, x + i), scales);
    hn::StoreU(hn::Mul(normed, hn::LoadU(d, weight + i)), d, out + i);
  }
  for (; i < width; ++i) out[i] = x[i] * scale * weight[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
HWY_EXPORT(RmsNormRow);

absl::Status RmsNormCpu(const RmsNormArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateRmsNorm(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const auto norm_row = HWY_DYNAMIC_DISPATCH(RmsNormRow);
    ParallelRows(pool, args.x.rows, args.x.cols, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        norm_row(args.x.Row<float>(row), args.weight, args.epsilon, args.out.Row<float>(row),
                 args.x.cols);
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
