// The plain, scalar meaning of every stored weight type: what the fast paths are checked against.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/dtype.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// Widens a row of `elements` floats or whole blocks, as a checkpoint stores them, to
// `out` [elements]. InvalidArgument for other types, float8 among them, and for part of a block.
absl::Status DequantiseRow(DType dtype, const std::byte* row, int64_t elements, float* out);

// Widens row `row` of `rows`, float8 too, to `out` [k]. InvalidArgument for other types and where
// the row begins or ends inside a block of GGUF.
absl::Status DequantiseRow(const WeightRows& rows, int64_t row, float* out);

}  // namespace heddle
