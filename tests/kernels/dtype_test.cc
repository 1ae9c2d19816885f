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
