#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"
#include "kernels/moe/moe_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/expert_combine_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE void AddScaledAt(D d, float weight, const float* y, float* out, int64_t i) {
  const auto sum = hn::MulAdd(hn::Set(d, weight), hn::LoadU(d, y + i), hn::LoadU(d, out + i));
  hn::StoreU(sum, d, out + i);
}

// out += weight * y.
void AddScaledRow(float weight, const float* y, float* out, int64_t width) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= width; i += lanes) AddScaledAt(d, weight, y, out, i);
  for (; i < width; ++i) AddScaledAt(hn::CappedTag<float, 1>(), weight, y, out, i);
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
namespace {

HWY_EXPORT(AddScaledRow);

absl::Status CheckEntries(const ExpertCombineArgs& args) {
  for (int64_t i = 0; i < args.out.rows * args.top_k; ++i) {
    if (args.entry_of[i] < -1 || args.entry_of[i] >= args.y.rows) {
      return absl::OutOfRangeError(absl::StrCat("expert_combine: choice ", i, " asks for entry ",
                                                args.entry_of[i], " of ", args.y.rows));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ExpertCombineCpu(const ExpertCombineArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateExpertCombine(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    RETURN_IF_ERROR(CheckEntries(args));
    const int64_t width = args.out.cols;
    if (width == 0) return absl::OkStatus();
    const auto add_scaled_row = HWY_DYNAMIC_DISPATCH(AddScaledRow);
    ParallelRows(pool, args.out.rows, (args.top_k + 1) * width, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        float* out = args.out.Row<float>(token);
        if (!args.add) std::fill_n(out, width, 0.0f);
        for (int64_t i = token * args.top_k; i < (token + 1) * args.top_k; ++i) {
          const int32_t entry = args.entry_of[i];
          if (entry >= 0) add_scaled_row(args.weights[i], args.y.Row<float>(entry), out, width);
        }
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
