// Values as pages of a type hold them.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/base/dtype.h"

namespace heddle {

// `value` after a stay in a page.
inline float Stored(DType dtype, float value) {
  if (dtype == DType::kBFloat16) return BFloat16ToFloat(FloatToBFloat16(value));
  if (dtype == DType::kFloat16) return Float16ToFloat(FloatToFloat16(value));
  return value;
}

inline std::vector<std::byte> Encode(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * (dtype == DType::kFloat32 ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half =
        dtype == DType::kBFloat16 ? FloatToBFloat16(values[i]) : FloatToFloat16(values[i]);
    if (dtype == DType::kFloat32) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  return bytes;
}

}  // namespace heddle
