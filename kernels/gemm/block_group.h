// GGUF's quantised blocks, read 32 elements at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace heddle {

inline constexpr int kGroupElements = 32;

// What an element's value is computed from; compile-time facts of a block type.
//   value = scale * (quant - zero_point)            without a minimum
//   value = scale * quant + minimum                 with one
struct BlockTraits {
  int low_bits;   // 4 or 8; 8 means a signed quant
  int high_bits;  // 0, 1 or 2 more bits above the low four
  int zero_point;
  bool has_minimum;
  bool is_k_quant;       // scales are products of an f16 of 256 elements and an integer
  int scales_per_group;  // 1, or 2 where a scale covers 16 elements
};

constexpr BlockTraits BlockTraitsOf(DType dtype) {
  switch (dtype) {
    case DType::kQ8_0:
      return {8, 0, 0, false, false, 1};
    case DType::kQ4_0:
      return {4, 0, 8, false, false, 1};
    case DType::kQ4_1:
      return {4, 0, 0, true, false, 1};
    case DType::kQ5_0:
      return {4, 1, 16, false, false, 1};
    case DType::kQ5_1:
      return {4, 1, 0, true, false, 1};
    case DType::kQ4_K:
      return {4, 0, 0, true, true, 1};
    case DType::kQ5_K:
      return {4, 1, 0, true, true, 1};
    case DType::kQ6_K:
      return {4, 2, 32, false, true, 2};
    default:
      return {};
  }
}

// 32 consecutive elements as the file holds them.
struct BlockGroup {
  uint8_t quants[kGroupElements];  // an int8 for Q8_0
  uint16_t scale = 0;              // f16
  uint16_t minimum = 0;            // f16; of a K-quant it is subtracted
  // K-quants only: factors of `scale` (one for each 16 elements of Q6_K) and of `minimum`.
  int8_t scale_factor[2] = {1, 1};
  uint8_t minimum_factor = 1;
};

// The group that begins at element `first` (a multiple of 32) of a row of blocks.
BlockGroup ReadBlockGroup(DType dtype, const std::byte* row, int64_t first);

// The values of the group's elements, each rounded to f32 once.
void DequantiseGroup(DType dtype, const BlockGroup& group, float* out);

}  // namespace heddle
