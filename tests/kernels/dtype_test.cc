#include "kernels/base/dtype.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace heddle {
namespace {

TEST(DType, EveryFloat16SurvivesARoundTrip) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = Float16ToFloat(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Float16ToFloat(FloatToFloat16(value))));
    } else {
      EXPECT_EQ(FloatToFloat16(value), half);
    }
  }
}

TEST(DType, Float16RoundsToNearestEven) {
  EXPECT_EQ(FloatToFloat16(65504.0f), 0x7bff);
  EXPECT_EQ(FloatToFloat16(65519.9f), 0x7bff);
  EXPECT_EQ(FloatToFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToFloat16(1.0f + 0x1p-11f), 0x3c00);      // tie, to even
  EXPECT_EQ(FloatToFloat16(1.0f + 3 * 0x1p-11f), 0x3c02);  // tie, to even
  EXPECT_EQ(FloatToFloat16(0x1p-25f), 0);                  // tie, to zero
  EXPECT_EQ(FloatToFloat16(std::nextafter(0x1p-25f, 1.0f)), 1);
}

TEST(DType, BFloat16RoundsToNearestEven) {
  EXPECT_EQ(FloatToBFloat16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBFloat16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(FloatToBFloat16(1.0f + 3 * 0x1p-8f), 0x3f82);
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(std::nanf("")))));
}

// Every code, from its fields.
TEST(DType, Float8E4M3IsWidenedExactly) {
  for (int bits = 0; bits < 256; ++bits) {
    const auto code = static_cast<uint8_t>(bits);
    const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
    const float value = Float8E4M3ToFloat(code);
    EXPECT_EQ(IsFloat8E4M3Nan(code), exponent == 15 && mantissa == 7);
    if (IsFloat8E4M3Nan(code)) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9)  // subnormal
                                           : std::ldexp(8 + mantissa, exponent - 10);
    EXPECT_EQ(value, bits < 128 ? magnitude : -magnitude) << bits;
    EXPECT_EQ(std::signbit(value), bits >= 128) << bits;
  }
  EXPECT_EQ(Float8E4M3ToFloat(0x7e), 448.0f);
  EXPECT_EQ(Float8E4M3ToFloat(0x38), 1.0f);
  EXPECT_EQ(Float8E4M3ToFloat(0x01), 0x1p-9f);
}

TEST(DType, RowBytesRefusesPartBlocksAndOverflow) {
  EXPECT_EQ(*RowBytes(DType::kQ4_1, 576), 18 * 20);
  EXPECT_EQ(*RowBytes(DType::kBFloat16, 3), 6);
  EXPECT_FALSE(RowBytes(DType::kQ4_1, 33).ok());
  EXPECT_FALSE(RowBytes(DType::kFloat32, std::numeric_limits<int64_t>::max()).ok());
  EXPECT_FALSE(RowBytes(DType::kFloat32, -1).ok());
}

TEST(DType, NamesParseBack) {
  for (int i = 0; i <= static_cast<int>(DType::kQ6_K); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(*ParseDType(DTypeName(dtype)), dtype);
  }
  EXPECT_EQ(*ParseDType("bf16"), DType::kBFloat16);
  EXPECT_FALSE(ParseDType("float8").ok());
}

}  // namespace
}  // namespace heddle
