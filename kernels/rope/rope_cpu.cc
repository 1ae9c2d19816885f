#include "kernels/rope/rope_cpu.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope/rope_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rotates the pairs (x[i], x[half + i]).
template <class D>
HWY_INLINE void RotateAt(D d, float* x, const float* cos_sin, int64_t half, int64_t i) {
  const auto cosine = hn::LoadU(d, cos_sin + i), sine = hn::LoadU(d, cos_sin + half + i);
  const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + half + i);
  hn::StoreU(hn::Sub(hn::Mul(a, cosine), hn::Mul(b, sine)), d, x + i);
  hn::StoreU(hn::Add(hn::Mul(b, cosine), hn::Mul(a, sine)), d, x + half + i);
}

// Rotates the pairs (x[2i], x[2i + 1]).
template <class D>
HWY_INLINE void RotateInterleavedAt(D d, float* x, const float* cos_sin, int64_t half, int64_t i) {
  const auto cosine = hn::LoadU(d, cos_sin + i), sine = hn::LoadU(d, cos_sin + half + i);
  hn::Vec<D> a, b;
  hn::LoadInterleaved2(d, x + 2 * i, a, b);
  const auto rotated_a = hn::Sub(hn::Mul(a, cosine), hn::Mul(b, sine));
  const auto rotated_b = hn::Add(hn::Mul(b, cosine), hn::Mul(a, sine));
  hn::StoreInterleaved2(rotated_a, rotated_b, d, x + 2 * i);
}

void RotateHead(float* x, const float* cos_sin, int64_t half, bool interleaved) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  if (interleaved) {
    for (; i + lanes <= half; i += lanes) RotateInterleavedAt(d, x, cos_sin, half, i);
    for (; i < half; ++i) RotateInterleavedAt(d1, x, cos_sin, half, i);
  } else {
    for (; i + lanes <= half; i += lanes) RotateAt(d, x, cos_sin, half, i);
    for (; i < half; ++i) RotateAt(d1, x, cos_sin, half, i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
HWY_EXPORT(RotateHead);

absl::Status RopeCpu(const RopeArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateRope(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    for (int64_t row = 0; row < args.x.rows; ++row) {
      if (args.positions[row] < 0 || args.positions[row] >= args.num_positions) {
        return absl::OutOfRangeError(absl::StrCat("rope: token ", row, " has position ",
                                                  args.positions[row], " of ", args.num_positions));
      }
    }
    const auto rotate_head = HWY_DYNAMIC_DISPATCH(RotateHead);
    const int64_t kept = args.head_dim - args.rotary_dim;
    ParallelRows(pool, args.x.rows, args.x.cols, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* cos_sin = args.cos_sin + args.positions[row] * args.rotary_dim;
        for (int64_t head = 0; head < args.num_heads; ++head) {
          rotate_head(args.x.Row<float>(row) + head * args.head_dim + kept, cos_sin,
                      args.rotary_dim / 2, args.interleaved);
        }
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
