// The CPU's packing and matrix product.
#pragma once

#include "kernels/gemm/linear.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// See PackedWeightBytesFn, PackWeightFn and LinearFn. Streams must be CpuStreams.
absl::StatusOr<int64_t> PackedWeightBytesCpu(DType dtype, int64_t n, int64_t k, int64_t k_offset);
absl::Status PackWeightCpu(const WeightRows& rows, const PackedWeight& target, Stream& stream);
absl::Status LinearCpu(const LinearArgs& args, Stream& stream);

}  // namespace heddle
