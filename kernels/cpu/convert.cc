#include "kernels/cpu/convert.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Of magnitudes below 2^31, which compare fastest as signed numbers.
template <class D32>
HWY_INLINE hn::Mask<D32> Above(D32 d, hn::Vec<D32> magnitude, int32_t limit) {
  const hn::RebindToSigned<D32> di;
  return hn::RebindMask(d, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, limit)));
}

// Float32 in the low 16 bits of each lane as bfloat16; see FloatToBFloat16.
template <class D32>
HWY_INLINE hn::Vec<D32> BFloat16Bits(D32 d, hn::Vec<D32> bits) {
  const auto high = hn::ShiftRight<16>(bits);
  const auto rounding = hn::Add(hn::And(high, hn::Set(d, 1u)), hn::Set(d, 0x7fffu));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, rounding));
  const auto magnitude = hn::And(bits, hn::Set(d, 0x7fffffffu));
  return hn::IfThenElse(Above(d, magnitude, 0x7f800000), hn::Or(high, hn::Set(d, 0x40u)), rounded);
}

// The same as float16; see FloatToFloat16.
template <class D32>
HWY_INLINE hn::Vec<D32> Float16Bits(D32 d, hn::Vec<D32> bits) {
  const hn::RebindToFloat<D32> df;
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(d, 0x7fffffffu));
  const auto half = hn::Set(df, 0.5f);
  const auto small =
      hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(df, magnitude), half)), hn::BitCast(d, half));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 1u));
  const auto normal = hn::ShiftRight<13>(
      hn::Sub(hn::Add(magnitude, hn::Add(odd, hn::Set(d, 0xfffu))), hn::Set(d, 0x38000000u)));
  auto result = hn::IfThenElse(Above(d, magnitude, 0x387fffff), normal, small);
  result = hn::IfThenElse(Above(d, magnitude, 0x477fefff), hn::Set(d, 0x7c00u), result);
  result = hn::IfThenElse(Above(d, magnitude, 0x7f800000), hn::Set(d, 0x7e00u), result);
  return hn::Or(result, sign);
}

template <class D32>
HWY_INLINE void StoreHalvesAt(D32 d, const float* values, DType dtype, uint16_t* stored) {
  const hn::Rebind<uint16_t, D32> d16;
  const auto bits = hn::BitCast(d, hn::LoadU(hn::RebindToFloat<D32>(), values));
  const auto halves = dtype == DType::kBFloat16 ? BFloat16Bits(d, bits) : Float16Bits(d, bits);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<D32>(), halves)), d16, stored);
}

void StoreHalves(const float* values, int64_t count, DType dtype, uint16_t* stored) {
  const hn::ScalableTag<uint32_t> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) StoreHalvesAt(d, values + i, dtype, stored + i);
  for (; i < count; ++i) {
    StoreHalvesAt(hn::CappedTag<uint32_t, 1>(), values + i, dtype, stored + i);
  }
}

template <class D32>
HWY_INLINE void LoadHalvesAt(D32 d, const uint16_t* stored, DType dtype, float* values) {
  const hn::RebindToFloat<D32> df;
  if (dtype == DType::kBFloat16) {
    const auto bits = hn::PromoteTo(d, hn::LoadU(hn::Rebind<uint16_t, D32>(), stored));
    hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(bits)), df, values);
  } else {
    const auto* halves = reinterpret_cast<const hwy::float16_t*>(stored);
    hn::StoreU(hn::PromoteTo(df, hn::LoadU(hn::Rebind<hwy::float16_t, D32>(), halves)), df, values);
  }
}

void LoadHalves(const uint16_t* stored, int64_t count, DType dtype, float* values) {
  const hn::ScalableTag<uint32_t> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) LoadHalvesAt(d, stored + i, dtype, values + i);
  for (; i < count; ++i) {
    LoadHalvesAt(hn::CappedTag<uint32_t, 1>(), stored + i, dtype, values + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
HWY_EXPORT(StoreHalves);
HWY_EXPORT(LoadHalves);

void StoreFloats(const float* values, int64_t count, DType dtype, void* stored) {
  if (count == 0) return;
  if (dtype == DType::kFloat32) {
    std::memcpy(stored, values, count * sizeof(float));
  } else {
    HWY_DYNAMIC_DISPATCH(StoreHalves)(values, count, dtype, static_cast<uint16_t*>(stored));
  }
}

void LoadFloats(const void* stored, int64_t count, DType dtype, float* values) {
  if (count == 0) return;
  if (dtype == DType::kFloat32) {
    std::memcpy(values, stored, count * sizeof(float));
  } else {
    HWY_DYNAMIC_DISPATCH(LoadHalves)
    (static_cast<const uint16_t*>(stored), count, dtype, values);
  }
}

}  // namespace heddle
#endif  // HWY_ONCE
