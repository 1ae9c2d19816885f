// Sums and maxima of float32 rows of several ranks.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/communicator.h"

namespace heddle {

// out[i] = sources[0][i] op sources[1][i] op ..., in this order. `out` may be one of the sources.
void ReduceInOrder(std::span<const float* const> sources, int64_t count, ReduceOp op, float* out);

}  // namespace heddle
