// exp and log that give the same bits on every machine.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace heddle {

// Ranks decide alike from the same gathered numbers, whatever their CPU and C library: these use
// IEEE additions and multiplications alone, in a fixed order (the build forbids contraction). Loops
// over ExactExp vectorise.

inline constexpr double kLn2High = 0x1.62e42fefa0000p-1;  // k * kLn2High is exact for |k| < 2^11
inline constexpr double kLn2Low = 0x1.cf79abc9e3b3ap-40;

// For x <= 0; -infinity gives 0, as does anything below -708. Error below 2 units in the last
// place.
inline double ExactExp(double x) {
  const double clamped = std::max(x, -708.0);
  // The addition leaves round(x / ln 2) in the low bits of `shifted`.
  constexpr double kShifter = 0x1.8p52;
  const double shifted = clamped * 0x1.71547652b82fep+0 + kShifter;
  const double k = shifted - kShifter;
  const double r = (clamped - k * kLn2High) - k * kLn2Low;  // |r| <= ln(2) / 2
  // Taylor to the 13th power, as a tree, so that its operations overlap.
  const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
  const double p0 = (1.0 + r) + (1.0 / 2 + 1.0 / 6 * r) * r2;
  const double p4 = (1.0 / 24 + 1.0 / 120 * r) + (1.0 / 720 + 1.0 / 5040 * r) * r2;
  const double p8 = (1.0 / 40320 + 1.0 / 362880 * r) + (1.0 / 3628800 + 1.0 / 39916800 * r) * r2;
  const double p12 = 1.0 / 479001600 + 1.0 / 6227020800 * r;
  const double sum = (p0 + p4 * r4) + (p8 + p12 * r4) * r8;
  const double power = std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023) << 52);
  return x < -708.0 ? 0.0 : sum * power;
}

// For normal x > 0. Error below 2 units in the last place, except relative to results near 0.
inline double ExactLog(double x) {
  // x = 2^k m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1).
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t shifted = bits + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd);
  const double k = static_cast<double>(static_cast<int64_t>(shifted >> 52) - 1023);
  const double m = std::bit_cast<double>((shifted & 0xfffffffffffff) + 0x3fe6a09e667f3bcd);
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double series = 1.0 / 23;
  for (int odd = 21; odd >= 3; odd -= 2) series = series * s2 + 1.0 / odd;
  return k * kLn2High + (k * kLn2Low + (2.0 * s + 2.0 * s * s2 * series));
}

}  // namespace heddle
