// Dot products of four weights and four activations, both bytes, in each 32-bit lane: the one place
// of instructions that Highway does not name. Sums are exact integers, so every way gives the same.
// Included once for each instruction set.
#if defined(HEDDLE_INT8_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_INT8_DOT_INL_H_
#undef HEDDLE_INT8_DOT_INL_H_
#else
#define HEDDLE_INT8_DOT_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/gemm/block_panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {

HWY_INLINE int32_t LoadFourBytes(const int8_t* bytes) {
  int32_t four;
  hwy::CopyBytes<sizeof(four)>(bytes, &four);
  return four;
}

// Sums over weights of one type: kSigned int8, else unsigned bytes up to kMaxQuant. Activations are
// in [-127, 127]. The weights that enter the sum are larger than the quants by kBias, which the
// caller takes off with the sum of the activations.
// Activations are passed as the address of four bytes.
#if HWY_TARGET == HWY_AVX3_DL

using FourBytes [[gnu::may_alias]] = int32_t;

template <bool kSigned, int kMaxQuant>
struct Int8Dot {
  static constexpr int kBias = kSigned ? 128 : 0;
  using Weights = Uint32Vector;
  static HWY_INLINE Weights Prepare(Uint32Vector quants) {
    return kSigned ? hn::Xor(quants, hn::Set(Uint32Tag(), 0x80808080u)) : quants;
  }
  // kIndex: the vector's place in its group.
  template <int kIndex>
  HWY_INLINE void Add(Weights weights, const int8_t* activations) {
    // Highway's target for these processors asks the compiler for AVX-VNNI, which Zen 4 lacks, in
    // place of AVX512-VNNI, which it finds at run time; so the intrinsic is not to be had.
    __m512i sum = total.raw;
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(weights.raw), "m"(*reinterpret_cast<const FourBytes*>(activations)));
    total.raw = sum;
  }

  Int32Vector total;  // begins as zeros, set by the caller
};

#elif HWY_TARGET == HWY_AVX2

// Products of an unsigned and a signed byte, added in pairs, fill 16 bits at most; as many pairs as
// fit are added there before they are widened.
template <bool kSigned, int kMaxQuant>
struct Int8Dot {
  static constexpr int kBias = 0;
  static constexpr int kAddsPerWidening = 32767 / (2 * 127 * kMaxQuant);
  using Int16Vector = hn::Vec<hn::Repartition<int16_t, Int32Tag> >;
  struct Weights {
    Uint32Vector magnitude;
    Int32Vector sign;  // of kSigned weights
  };

  static HWY_INLINE Weights Prepare(Uint32Vector quants) {
    const Int32Vector sign = hn::BitCast(Int32Tag(), quants);
    return {kSigned ? Uint32Vector{_mm256_abs_epi8(quants.raw)} : quants, sign};
  }
  static HWY_INLINE Int16Vector MultiplyPairs(Weights weights, const int8_t* activations) {
    __m256i x = _mm256_set1_epi32(LoadFourBytes(activations));
    if constexpr (kSigned) x = _mm256_sign_epi8(x, weights.sign.raw);
    return Int16Vector{_mm256_maddubs_epi16(weights.magnitude.raw, x)};
  }
  static HWY_INLINE Int32Vector AddPairs(Int16Vector sums) {
    return Int32Vector{_mm256_madd_epi16(sums.raw, _mm256_set1_epi16(1))};
  }

  template <int kIndex>
  HWY_INLINE void Add(Weights weights, const int8_t* activations) {
    const Int16Vector products = MultiplyPairs(weights, activations);
    pairs = kIndex % kAddsPerWidening == 0 ? products : hn::Add(pairs, products);
    // Groups and halves of them have 8 or 4 vectors: a multiple, or less than one widening.
    constexpr int kLast = kAddsPerWidening < 8 ? kAddsPerWidening : 8;
    if constexpr ((kIndex + 1) % kLast == 0) total = hn::Add(total, AddPairs(pairs));
  }

  Int16Vector pairs;
  Int32Vector total;  // begins as zeros, set by the caller
};

#else

template <bool kSigned, int kMaxQuant>
struct Int8Dot {
  static constexpr int kBias = 0;
  using Weights = Uint32Vector;
  static HWY_INLINE Weights Prepare(Uint32Vector quants) { return quants; }
  template <int kIndex>
  HWY_INLINE void Add(Weights weights, const int8_t* activations) {
    const Int32Tag d;
    const Int32Vector x = hn::Set(d, LoadFourBytes(activations));
    Unrolled<4>([&](auto byte) HWY_ATTR {
      const Uint32Vector top = hn::ShiftLeft<24 - 8 * byte>(weights);
      const Int32Vector weight = kSigned ? hn::ShiftRight<24>(hn::BitCast(d, top))
                                         : hn::BitCast(d, hn::ShiftRight<24>(top));
      const Int32Vector activation = hn::ShiftRight<24>(hn::ShiftLeft<24 - 8 * byte>(x));
      total = hn::Add(total, hn::Mul(weight, activation));
    });
  }

  Int32Vector total;  // begins as zeros, set by the caller
};

#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
