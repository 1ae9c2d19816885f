// The plain, scalar meaning of every stored weight type: what the fast paths are checked against.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/dtype.h"

namespace heddle {

// Widens a row of `elements` floats or whole blocks, as a checkpoint stores them, to
// `out` [elements]. InvalidArgument for other types and for part of a block.
absl::Status DequantiseRow(DType dtype, const std::byte* row, int64_t elements, float* out);

}  // namespace heddle
