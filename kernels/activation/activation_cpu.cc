#include "kernels/activation/activation_cpu.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/activation/activation_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE void AddAt(D d, const float* x, float* target, int64_t i) {
  hn::StoreU(hn::Add(hn::LoadU(d, target + i), hn::LoadU(d, x + i)), d, target + i);
}

void AddRow(const float* x, float* target, int64_t width) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= width; i += lanes) AddAt(d, x, target, i);
  for (; i < width; ++i) AddAt(hn::CappedTag<float, 1>(), x, target, i);
}

template <class D>
HWY_INLINE void SiluMulAt(D d, const float* gate, const float* up, float* out, int64_t i) {
  const auto x = hn::LoadU(d, gate + i);
  const auto silu = hn::Div(x, hn::Add(hn::Set(d, 1.0f), Exp(d, hn::Neg(x))));
  hn::StoreU(hn::Mul(silu, hn::LoadU(d, up + i)), d, out + i);
}

void SiluMulRow(const float* gate, const float* up, float* out, int64_t width) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= width; i += lanes) SiluMulAt(d, gate, up, out, i);
  for (; i < width; ++i) SiluMulAt(hn::CappedTag<float, 1>(), gate, up, out, i);
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
HWY_EXPORT(AddRow);
HWY_EXPORT(SiluMulRow);

absl::Status AddCpu(const AddArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateAdd(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const auto add_row = HWY_DYNAMIC_DISPATCH(AddRow);
    ParallelRows(pool, args.x.rows, args.x.cols, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        add_row(args.x.Row<float>(row), args.target.Row<float>(row), args.x.cols);
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status CopyHeadsCpu(const CopyHeadsArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateCopyHeads(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const int64_t heads = args.x.heads, dim = args.x.dim;
    if (dim == 0) return absl::OkStatus();
    ParallelRows(pool, args.x.tokens * heads, dim, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        std::memcpy(args.out.At(row / heads, row % heads), args.x.At(row / heads, row % heads),
                    dim * sizeof(float));
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status SiluMulCpu(const SiluMulArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateSiluMul(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const int64_t rows = args.num_rows == nullptr ? args.gate.rows : *args.num_rows;
    if (rows < 0 || rows > args.gate.rows) {
      return absl::OutOfRangeError(absl::StrCat("silu_mul: ", rows, " rows of ", args.gate.rows));
    }
    const auto silu_mul_row = HWY_DYNAMIC_DISPATCH(SiluMulRow);
    ParallelRows(pool, rows, args.gate.cols, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        silu_mul_row(args.gate.Row<float>(row), args.up.Row<float>(row), args.out.Row<float>(row),
                     args.gate.cols);
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status GatherRowsCpu(const GatherRowsArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateGatherRows(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool&) {
    for (int64_t i = 0; i < args.out.rows; ++i) {
      const int64_t row = args.rows[i];
      if (row < 0 || row >= args.x.rows) {
        return absl::OutOfRangeError(
            absl::StrCat("gather_rows: index ", i, " asks for row ", row, " of ", args.x.rows));
      }
      if (args.x.cols > 0) {
        std::memcpy(args.out.Row<float>(i), args.x.Row<float>(row), args.x.cols * sizeof(float));
      }
    }
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
