// Rows of float32 to and from the types in which pages keep them.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace heddle {

// `stored` holds `count` elements of `dtype`: float32, bfloat16 or float16. The same bits as the
// conversions of one element in dtype.h: exact where the target can hold a value, else to nearest
// even.
void StoreFloats(const float* values, int64_t count, DType dtype, void* stored);
void LoadFloats(const void* stored, int64_t count, DType dtype, float* values);

}  // namespace heddle
