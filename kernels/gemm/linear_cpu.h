// The CPU's packing and matrix products.
#pragma once

#include "kernels/gemm/grouped_linear.h"
#include "kernels/gemm/head_linear.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// See PackedWeightBytesFn, PackWeightFn, LinearFn, GroupedLinearFn and HeadLinearFn.
// Streams must be CpuStreams.
absl::StatusOr<int64_t> PackedWeightBytesCpu(const PackedWeight& weight);
absl::Status PackWeightCpu(const WeightRows& rows, const PackedWeight& target, Stream& stream);
absl::Status LinearCpu(const LinearArgs& args, Stream& stream);
absl::Status GroupedLinearCpu(const GroupedLinearArgs& args, Stream& stream);
absl::Status HeadLinearCpu(const HeadLinearArgs& args, Stream& stream);

}  // namespace heddle
