// Rows back out of a packed weight: for embeddings, and for tests of the packing.
#pragma once

#include "kernels/gemm/packed_layout.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// Widens row `row` of W to out [k]. `layout` is the weight's. Reads a whole panel: 16 times the
// bytes of the row, as a row is one lane of it.
void UnpackRow(const PackedWeight& weight, const PackedLayout& layout, int64_t row, float* out);

}  // namespace heddle
