// e^x on vectors of float32, for files that are compiled once per Highway target.
//
// Within 1.5 ulp of the exact value where that is between 2^-126 and 2^127; below, 0; above,
// infinity. Unlike with Highway's own, NaN stays NaN: a bad activation must reach the logits, where
// its row is refused. e^0 is exactly 1.
#if defined(HEDDLE_KERNELS_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KERNELS_CPU_EXP_INL_H_
#undef HEDDLE_KERNELS_CPU_EXP_INL_H_
#else
#define HEDDLE_KERNELS_CPU_EXP_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {

// For x <= 88, as of a score minus the maximum of its row.
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> ExpUpTo88(D d, hwy::HWY_NAMESPACE::Vec<D> x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<D> di;
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in
  // the low bits.
  const auto magic = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const auto n = hn::Sub(shifted, magic);
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // e^r: minimax polynomial of degree 7, with 1 + r exact.
  auto p = hn::MulAdd(hn::Set(d, 1.9875691500e-4f), r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  const auto power = hn::BitCast(d, hn::Add(exponent, hn::Set(di, 127 << 23)));
  // Below, the exponent wraps. The comparison is false for NaN, which keeps its NaN.
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.336544f)), hn::Mul(p, power));
}

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> Exp(D d, hwy::HWY_NAMESPACE::Vec<D> x) {
  namespace hn = hwy::HWY_NAMESPACE;
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.02969f)), hn::Inf(d), ExpUpTo88(d, x));
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_CPU_EXP_INL_H_
