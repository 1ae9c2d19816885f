#include "kernels/cpu/convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace heddle {
namespace {

// Every exponent with mantissas around each point where rounding changes, both signs, NaN too.
std::vector<float> TrickyFloats() {
  std::vector<float> values;
  std::mt19937 random(1);
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const uint32_t mantissa : {0u,
                                    1u,
                                    0xfffu,
                                    0x1000u,
                                    0x1001u,
                                    0x2fffu,
                                    0x3000u,
                                    0x3001u,
                                    0x7fffu,
                                    0x8000u,
                                    0x8001u,
                                    0x17fffu,
                                    0x18000u,
                                    0x18001u,
                                    0x400000u,
                                    0x7fe000u,
                                    0x7ff000u,
                                    0x7fffffu,
                                    static_cast<uint32_t>(random() & 0x7fffffu),
                                    static_cast<uint32_t>(random() & 0x7fffffu)}) {
      for (const uint32_t sign : {0u, 0x80000000u}) {
        values.push_back(std::bit_cast<float>(sign | exponent << 23 | mantissa));
      }
    }
  }
  return values;
}

TEST(Convert, StoresAsOneElementWould) {
  const std::vector<float> values = TrickyFloats();
  // A count that leaves a rest whatever the vector.
  for (const size_t count : {values.size() - 3, size_t{5}, size_t{0}}) {
    std::vector<uint16_t> halves(count + 1, 0x7777);
    StoreFloats(values.data(), static_cast<int64_t>(count), DType::kBFloat16, halves.data());
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(halves[i], FloatToBFloat16(values[i])) << i;
    StoreFloats(values.data(), static_cast<int64_t>(count), DType::kFloat16, halves.data());
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(halves[i], FloatToFloat16(values[i])) << i;
    EXPECT_EQ(halves[count], 0x7777);
    std::vector<float> floats(count + 1, 7.0f);
    StoreFloats(values.data(), static_cast<int64_t>(count), DType::kFloat32, floats.data());
    EXPECT_EQ(std::memcmp(floats.data(), values.data(), count * sizeof(float)), 0);
    EXPECT_EQ(floats[count], 7.0f);
  }
}

TEST(Convert, LoadsEveryHalf) {
  std::vector<uint16_t> halves(65536 + 3);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<float> floats(halves.size() + 1, 7.0f);
    LoadFloats(halves.data(), static_cast<int64_t>(halves.size()), dtype, floats.data());
    for (size_t i = 0; i < halves.size(); ++i) {
      const float expected =
          dtype == DType::kBFloat16 ? BFloat16ToFloat(halves[i]) : Float16ToFloat(halves[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(floats[i])) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(floats[i]), std::bit_cast<uint32_t>(expected)) << i;
      }
    }
    EXPECT_EQ(floats.back(), 7.0f);
  }
}

}  // namespace
}  // namespace heddle
