#include "kernels/gemm/block_group.h"

#include <cstring>

#include "kernels/base/logging.h"

namespace heddle {
namespace {

uint16_t ReadF16(const uint8_t* bytes) {
  uint16_t bits;  // GGUF is little-endian, as is every host we build for.
  std::memcpy(&bits, bytes, sizeof(bits));
  return bits;
}

// 32 nibbles in 16 bytes: the low ones come first.
void ReadNibbles(const uint8_t* packed, uint8_t* quants) {
  for (int i = 0; i < 16; ++i) {
    quants[i] = packed[i] & 15;
    quants[i + 16] = packed[i] >> 4;
  }
}

// 32 further bits, one a quant, least significant first.
void AddHighBits(const uint8_t* bits, uint8_t* quants) {
  for (int i = 0; i < 32; ++i) quants[i] |= ((bits[i / 8] >> (i % 8)) & 1) << 4;
}

// Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes. The first four of each
// fill the low six bits of bytes 0-3 and 4-7; the others take four bits of bytes 8-11 and the two
// bits left above the first ones.
void ReadScaleAndMinimum(const uint8_t* packed, int index, BlockGroup& group) {
  if (index < 4) {
    group.scale_factor[0] = packed[index] & 63;
    group.minimum_factor = packed[index + 4] & 63;
  } else {
    group.scale_factor[0] = (packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4;
    group.minimum_factor = (packed[index + 4] >> 4) | (packed[index] >> 6) << 4;
  }
  group.scale_factor[1] = group.scale_factor[0];
}

// Q4_K and Q5_K: 128 bytes hold four times 64 elements, 32 low nibbles before 32 high ones.
void ReadNibblesOf64(const uint8_t* packed, int index, uint8_t* quants) {
  for (int i = 0; i < 32; ++i) {
    quants[i] = (packed[index / 2 * 32 + i] >> (index % 2 * 4)) & 15;
  }
}

// Q6_K: each half of 128 elements has 64 bytes of nibbles (groups 0 and 1 low, 2 and 3 high) and
// 32 bytes of bit pairs (group g at bit 2 g).
void ReadSixBits(const uint8_t* low, const uint8_t* high, int index, uint8_t* quants) {
  const int half = index / 4, group = index % 4;
  low += half * 64 + group % 2 * 32;
  high += half * 32;
  for (int i = 0; i < 32; ++i) {
    quants[i] = ((low[i] >> (group / 2 * 4)) & 15) | ((high[i] >> (group * 2)) & 3) << 4;
  }
}

}  // namespace

BlockGroup ReadBlockGroup(DType dtype, const std::byte* row, int64_t first) {
  const int64_t block_elements = BlockElements(dtype);
  const auto* block =
      reinterpret_cast<const uint8_t*>(row) + first / block_elements * BlockBytes(dtype);
  const int index = static_cast<int>(first % block_elements) / kGroupElements;
  BlockGroup group;
  switch (dtype) {
    case DType::kQ8_0:
      group.scale = ReadF16(block);
      std::memcpy(group.quants, block + 2, 32);
      return group;
    case DType::kQ4_0:
      group.scale = ReadF16(block);
      ReadNibbles(block + 2, group.quants);
      return group;
    case DType::kQ4_1:
      group.scale = ReadF16(block);
      group.minimum = ReadF16(block + 2);
      ReadNibbles(block + 4, group.quants);
      return group;
    case DType::kQ5_0:
      group.scale = ReadF16(block);
      ReadNibbles(block + 6, group.quants);
      AddHighBits(block + 2, group.quants);
      return group;
    case DType::kQ5_1:
      group.scale = ReadF16(block);
      group.minimum = ReadF16(block + 2);
      ReadNibbles(block + 8, group.quants);
      AddHighBits(block + 4, group.quants);
      return group;
    case DType::kQ4_K:
      group.scale = ReadF16(block);
      group.minimum = ReadF16(block + 2);
      ReadScaleAndMinimum(block + 4, index, group);
      ReadNibblesOf64(block + 16, index, group.quants);
      return group;
    case DType::kQ5_K:
      group.scale = ReadF16(block);
      group.minimum = ReadF16(block + 2);
      ReadScaleAndMinimum(block + 4, index, group);
      ReadNibblesOf64(block + 48, index, group.quants);
      for (int i = 0; i < 32; ++i) group.quants[i] |= ((block[16 + i] >> index) & 1) << 4;
      return group;
    case DType::kQ6_K:
      group.scale = ReadF16(block + 208);
      ReadSixBits(block, block + 128, index, group.quants);
      std::memcpy(group.scale_factor, block + 192 + index * 2, 2);
      return group;
    default:
      CHECK(false) << DTypeName(dtype) << " has no blocks";
      return group;
  }
}

// Products of an f16 with these small integers are exact in f32, so each value is rounded once.
void DequantiseGroup(DType dtype, const BlockGroup& group, float* out) {
  const BlockTraits traits = BlockTraitsOf(dtype);
  const float scale = Float16ToFloat(group.scale);
  const float minimum = Float16ToFloat(group.minimum) * static_cast<float>(group.minimum_factor) *
                        (traits.is_k_quant ? -1.0f : 1.0f);
  for (int i = 0; i < kGroupElements; ++i) {
    const int quant = traits.low_bits == 8 ? static_cast<int8_t>(group.quants[i])
                                           : group.quants[i] - traits.zero_point;
    const float factor = static_cast<float>(group.scale_factor[i / 16]);
    out[i] = scale * factor * static_cast<float>(quant);
    if (traits.has_minimum) out[i] += minimum;
  }
}

}  // namespace heddle
