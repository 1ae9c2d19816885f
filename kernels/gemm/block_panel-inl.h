// Groups of a panel of blocks, in registers: quants as bytes, scales and minima as floats. Included
// once for each instruction set; packed_layout.h has the layout.
#if defined(HEDDLE_BLOCK_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_BLOCK_PANEL_INL_H_
#undef HEDDLE_BLOCK_PANEL_INL_H_
#else
#define HEDDLE_BLOCK_PANEL_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

#include "hwy/highway.h"
#include "kernels/gemm/packed_layout.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A vector holds one number, or four bytes, of each of kLanes columns; kVectors make up a panel.
using FloatTag = hn::CappedTag<float, kPanelColumns>;
using Int32Tag = hn::RebindToSigned<FloatTag>;
using Uint32Tag = hn::RebindToUnsigned<FloatTag>;
using FloatVector = hn::Vec<FloatTag>;
using Int32Vector = hn::Vec<Int32Tag>;
using Uint32Vector = hn::Vec<Uint32Tag>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
inline constexpr int kVectors = kPanelColumns / kLanes;

inline constexpr int kQuantVectors = 8;  // vectors of four quants that make up a group

// Calls f(std::integral_constant<int, i>()) for each i of [0, kCount).
template <int kCount, class F>
HWY_INLINE void Unrolled(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>) HWY_ATTR {
    (f(std::integral_constant<int, i>()), ...);
  }
  (std::make_integer_sequence<int, kCount>());
}

// Elements 4 j to 4 j + 3 of a group as bytes, without the zero point taken off.
template <DType kType, int j>
HWY_INLINE Uint32Vector LoadQuants(const std::byte* quants, int vector) {
  constexpr BlockTraits kTraits = BlockTraitsOf(kType);
  const Uint32Tag d;
  const auto load = [&](int index) HWY_ATTR {
    return hn::Load(
        d, reinterpret_cast<const uint32_t*>(quants) + index * kPanelColumns + vector * kLanes);
  };
  if constexpr (kTraits.low_bits == 8) return load(j);

  Uint32Vector quant = load(j % 4);
  if constexpr (j >= 4) quant = hn::ShiftRight<4>(quant);
  quant = hn::And(quant, hn::Set(d, 0x0f0f0f0fu));
  if constexpr (kTraits.high_bits == 1) {
    Uint32Vector high = load(4);
    if constexpr (j < 4) high = hn::ShiftLeft<4 - j>(high);
    if constexpr (j > 4) high = hn::ShiftRight<j - 4>(high);
    quant = hn::Or(quant, hn::And(high, hn::Set(d, 0x10101010u)));
  } else if constexpr (kTraits.high_bits == 2) {
    Uint32Vector high = load(4 + j / 4);
    if constexpr (j % 4 < 2) high = hn::ShiftLeft<4 - j % 4 * 2>(high);
    if constexpr (j % 4 > 2) high = hn::ShiftRight<2>(high);
    quant = hn::Or(quant, hn::And(high, hn::Set(d, 0x30303030u)));
  }
  return quant;
}

struct GroupScales {
  FloatVector scale[2];  // of the first and the last 16 elements
  FloatVector minimum;   // to be added; only where the type has one
};

HWY_INLINE FloatVector LoadFloat16(const std::byte* values, int vector) {
  const hn::Rebind<hwy::float16_t, FloatTag> d;
  return hn::PromoteTo(
      FloatTag(), hn::Load(d, reinterpret_cast<const hwy::float16_t*>(values) + vector * kLanes));
}

template <typename Byte>
HWY_INLINE FloatVector LoadFactors(const std::byte* values, int vector) {
  const hn::Rebind<Byte, FloatTag> d;
  const auto bytes = hn::Load(d, reinterpret_cast<const Byte*>(values) + vector * kLanes);
  return hn::ConvertTo(FloatTag(), hn::PromoteTo(Int32Tag(), bytes));
}

template <DType kType>
HWY_INLINE GroupScales LoadScales(const PackedLayout& layout, const std::byte* panel, int64_t group,
                                  int vector) {
  constexpr BlockTraits kTraits = BlockTraitsOf(kType);
  constexpr ptrdiff_t kHalves = kPanelColumns * sizeof(uint16_t);
  const std::byte* scales = panel + layout.scales_offset + group * GroupScaleBytes(kType);
  GroupScales result;
  if constexpr (kTraits.is_k_quant) {
    const int64_t block = (layout.first_group + group) / kSuperGroups;
    const std::byte* super = panel + block * kHalves * (kTraits.has_minimum ? 2 : 1);
    const FloatVector scale = LoadFloat16(super, vector);
    result.scale[0] = hn::Mul(scale, LoadFactors<int8_t>(scales, vector));
    result.scale[1] = result.scale[0];
    if constexpr (kTraits.has_minimum) {
      const FloatVector minimum = LoadFloat16(super + kHalves, vector);
      const FloatVector factor = LoadFactors<uint8_t>(scales + kPanelColumns, vector);
      result.minimum = hn::Neg(hn::Mul(minimum, factor));
    } else {
      result.scale[1] = hn::Mul(scale, LoadFactors<int8_t>(scales + kPanelColumns, vector));
    }
  } else {
    result.scale[0] = result.scale[1] = LoadFloat16(scales, vector);
    if constexpr (kTraits.has_minimum) result.minimum = LoadFloat16(scales + kHalves, vector);
  }
  return result;
}

// Widens a group to out [32][16]. Products of an f16 with these small integers are exact, so that
// fusing or not gives the same floats as DequantiseGroup.
template <DType kType>
HWY_INLINE void DequantisePanelGroup(const PackedLayout& layout, const std::byte* panel,
                                     int64_t group, float* out) {
  constexpr BlockTraits kTraits = BlockTraitsOf(kType);
  const Int32Tag d;
  const std::byte* quants = panel + layout.quants_offset + group * GroupQuantBytes(kType);
  for (int vector = 0; vector < kVectors; ++vector) {
    const GroupScales scales = LoadScales<kType>(layout, panel, group, vector);
    Unrolled<kQuantVectors>([&](auto j) HWY_ATTR {
      const Int32Vector bytes = hn::BitCast(d, LoadQuants<kType, j>(quants, vector));
      Unrolled<4>([&](auto byte) HWY_ATTR {
        Int32Vector quant = hn::ShiftLeft<24 - 8 * byte>(bytes);
        if constexpr (kTraits.low_bits == 8) {
          quant = hn::ShiftRight<24>(quant);  // sign-extends
        } else {
          quant = hn::BitCast(d, hn::ShiftRight<24>(hn::BitCast(Uint32Tag(), quant)));
          quant = hn::Sub(quant, hn::Set(d, kTraits.zero_point));
        }
        const FloatVector scale = scales.scale[j / 4];
        FloatVector value = hn::Mul(scale, hn::ConvertTo(FloatTag(), quant));
        if constexpr (kTraits.has_minimum) value = hn::Add(value, scales.minimum);
        hn::Store(value, FloatTag(), out + (j * 4 + byte) * kPanelColumns + vector * kLanes);
      });
    });
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
