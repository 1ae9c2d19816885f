#include "kernels/gemm/linear_cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/unpack.h"

namespace heddle {

absl::Status LinearCpu(const LinearArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateLinear(args));
  const auto& [x, weight, bias, out, precision] = args;
  if (x.dtype != DType::kFloat32 || out.dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(absl::StrCat("linear: activations are float32 here, not ",
                                                   DTypeName(x.dtype), " and ",
                                                   DTypeName(out.dtype)));
  }
  RETURN_IF_ERROR(PackedLayout::Create(weight.dtype, weight.n, weight.k, weight.k_offset).status());
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const PackedLayout layout = PackedLayout::Of(args.weight);
    pool.ParallelFor(args.weight.n, [&](int64_t n) {
      std::vector<float> row(args.weight.k);
      UnpackRow(args.weight, layout, n, row.data());
      for (int64_t m = 0; m < args.x.rows; ++m) {
        const float* x_row = args.x.Row<float>(m);
        float sum = args.bias != nullptr ? args.bias[n] : 0.0f;
        for (int64_t k = 0; k < args.weight.k; ++k) sum = std::fma(x_row[k], row[k], sum);
        args.out.Row<float>(m)[n] = sum;
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
