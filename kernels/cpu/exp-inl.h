// e^x on vectors of float32, for files that are compiled once per Highway target.
//
// Within 1.5 ulp of the exact value for results that are normal numbers; underflow gives 0,
// overflow infinity. Unlike Highway's own, NaN stays NaN: a bad activation must reach the logits,
// where its row is refused. e^0 is exactly 1.
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

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> Exp(D d, hwy::HWY_NAMESPACE::Vec<D> x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<D> di;
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer.
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
  // 2^n in two factors, so that n = 128 (x just under overflow) does not overflow on its own.
  const auto integer = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  const auto half = hn::ShiftRight<1>(integer);
  const auto bias = hn::Set(di, 127);
  const auto factor1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const auto factor2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(integer, half), bias)));
  auto result = hn::Mul(hn::Mul(p, factor1), factor2);
  // Outside, the integers above wrap. Comparisons with NaN are false, which keeps its NaN.
  result = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.336544f)), result);
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.722839f)), hn::Inf(d), result);
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_CPU_EXP_INL_H_
