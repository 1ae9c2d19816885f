#include "kernels/gemm/unpack.h"

#include <algorithm>
#include <cstring>

namespace heddle {
namespace {

float UnpackPlainElement(DType dtype, const std::byte* panel, int column, int64_t k) {
  const auto* halves = reinterpret_cast<const uint16_t*>(panel);
  switch (dtype) {
    case DType::kBFloat16:
      return BFloat16ToFloat(halves[PairIndex(k, column)]);
    case DType::kFloat16:
      return Float16ToFloat(halves[k * kPanelColumns + column]);
    default:
      return reinterpret_cast<const float*>(panel)[k * kPanelColumns + column];
  }
}

float UnpackFloat8(const PackedLayout& layout, const std::byte* panel, int column, int64_t k) {
  const auto* codes = reinterpret_cast<const uint8_t*>(panel) + layout.quants_offset;
  const int64_t block = (layout.block_offset + k) / layout.block_columns;
  return Float8E4M3ToFloat(codes[PairIndex(k, column)]) *
         reinterpret_cast<const float*>(panel)[block * kPanelColumns + column];
}

// The inverse of the packing; see packed_layout.h.
BlockGroup UnpackGroup(DType dtype, const PackedLayout& layout, const std::byte* panel, int column,
                       int64_t g) {
  const BlockTraits traits = BlockTraitsOf(dtype);
  BlockGroup group;
  const std::byte* scales_of_group = panel + layout.scales_offset + g * GroupScaleBytes(dtype);
  const auto* scales = reinterpret_cast<const uint16_t*>(scales_of_group);
  if (traits.is_k_quant) {
    const auto* factors = reinterpret_cast<const uint8_t*>(scales_of_group);
    group.scale_factor[0] = group.scale_factor[1] = static_cast<int8_t>(factors[column]);
    const uint8_t second = factors[kPanelColumns + column];
    if (traits.has_minimum) {
      group.minimum_factor = second;
    } else {
      group.scale_factor[1] = static_cast<int8_t>(second);
    }
    const int64_t block = (layout.first_group + g) / kSuperGroups;
    scales = reinterpret_cast<const uint16_t*>(panel) +
             block * kPanelColumns * (traits.has_minimum ? 2 : 1);
  }
  group.scale = scales[column];
  if (traits.has_minimum) group.minimum = scales[kPanelColumns + column];

  constexpr int kVectorBytes = kPanelColumns * 4;
  const auto* quants =
      reinterpret_cast<const uint8_t*>(panel) + layout.quants_offset + g * GroupQuantBytes(dtype);
  for (int i = 0; i < kGroupElements; ++i) {
    const int vector = i / 4;
    const int byte = column * 4 + i % 4;
    if (traits.low_bits == 8) {
      group.quants[i] = quants[vector * kVectorBytes + byte];
      continue;
    }
    int quant = (quants[vector % 4 * kVectorBytes + byte] >> (vector / 4 * 4)) & 15;
    const uint8_t* high = quants + 4 * kVectorBytes + byte;
    if (traits.high_bits == 1) quant |= ((*high >> vector) & 1) << 4;
    if (traits.high_bits == 2) {
      quant |= ((high[vector / 4 * kVectorBytes] >> vector % 4 * 2) & 3) << 4;
    }
    group.quants[i] = static_cast<uint8_t>(quant);
  }
  return group;
}

}  // namespace

void UnpackRow(const PackedWeight& weight, const PackedLayout& layout, int64_t row, float* out) {
  const std::byte* panel = layout.Panel(weight.data, row / kPanelColumns);
  const int column = static_cast<int>(row % kPanelColumns);
  if (weight.dtype == DType::kFloat8E4M3) {
    for (int64_t k = 0; k < weight.k; ++k) {
      out[k] = UnpackFloat8(layout, panel, column, layout.lead + k);
    }
    return;
  }
  if (!IsBlockQuantised(weight.dtype)) {
    for (int64_t k = 0; k < weight.k; ++k) {
      out[k] = UnpackPlainElement(weight.dtype, panel, column, k);
    }
    return;
  }
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    float values[kGroupElements];
    DequantiseGroup(weight.dtype, UnpackGroup(weight.dtype, layout, panel, column, g), values);
    // The elements of the group that are ours.
    const int64_t first = g * kGroupElements - layout.lead;
    const int64_t begin = std::max<int64_t>(first, 0);
    const int64_t end = std::min(first + kGroupElements, weight.k);
    std::copy(values + (begin - first), values + (end - first), out + begin);
  }
}

}  // namespace heddle
