// The product against double precision, and its promise that bits depend on nothing but the row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gemm/linear_cpu.h"
#include "tests/kernels/every_target.h"
#include "tests/kernels/test_weight.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Activations quantised as the int8 path does, per 32 elements counted from the block that k_offset
// cuts, and widened again.
std::vector<double> QuantisedRow(const float* x, int64_t k, int64_t k_offset) {
  std::vector<double> result(k);
  for (int64_t first = -(k_offset % 32); first < k; first += 32) {
    const int64_t begin = std::max<int64_t>(first, 0), end = std::min(first + 32, k);
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
    const float scale = largest / 127.0f;
    for (int64_t i = begin; i < end; ++i) {
      const float quant = largest > 0 ? std::nearbyint(x[i] * (127.0f / largest)) : 0.0f;
      result[i] = static_cast<double>(scale) * quant;
    }
  }
  return result;
}

struct Product {
  std::vector<float> out;     // [rows, n]
  std::vector<double> exact;  // [rows, n]
  std::vector<double> scale;  // [rows, n], sum of the magnitudes of the terms
};

Product Multiply(const TestWeight& weight, const std::vector<float>& x, int64_t rows,
                 ActivationPrecision precision, const float* bias, int num_threads) {
  const int64_t n = weight.rows().n, k = weight.rows().k;
  CpuDevice device(num_threads);
  const PackedWeight packed = weight.Pack(device);
  Product product;
  product.out.assign(rows * n, kNan);
  const LinearArgs args = {FloatMatrix(x.data(), rows, k), packed, bias,
                           FloatMatrix(product.out.data(), rows, n), precision};
  EXPECT_TRUE(LinearCpu(args, device.stream()).ok());
  device.Synchronize();
  for (int64_t r = 0; r < rows; ++r) {
    const float* x_row = x.data() + r * k;
    const std::vector<double> activations = precision == ActivationPrecision::kInt8
                                                ? QuantisedRow(x_row, k, weight.rows().k_offset)
                                                : std::vector<double>(x_row, x_row + k);
    for (int64_t i = 0; i < n; ++i) {
      double sum = bias != nullptr ? bias[i] : 0;
      double scale = std::fabs(sum);
      for (int64_t j = 0; j < k; ++j) {
        sum += activations[j] * weight.at(i, j);
        scale += std::fabs(activations[j] * weight.at(i, j));
      }
      product.exact.push_back(sum);
      product.scale.push_back(scale);
    }
  }
  return product;
}

void ExpectClose(const Product& product) {
  for (size_t i = 0; i < product.out.size(); ++i) {
    ASSERT_NEAR(product.out[i], product.exact[i], 1e-30 + 2e-6 * product.scale[i]) << i;
  }
}

std::vector<ActivationPrecision> Precisions(DType dtype) {
  if (!IsBlockQuantised(dtype)) return {ActivationPrecision::kFloat32};
  return {ActivationPrecision::kFloat32, ActivationPrecision::kInt8};
}

std::string Name(DType dtype, ActivationPrecision precision) {
  return std::string(DTypeName(dtype)) +
         (precision == ActivationPrecision::kInt8 ? " with int8" : " with float32");
}

using LinearOnTarget = OnTarget;
INSTANTIATE_TEST_SUITE_P(Targets, LinearOnTarget, testing::ValuesIn(EveryTarget()), NameOfTarget);

TEST_P(LinearOnTarget, AgreesWithDoublePrecision) {
  std::mt19937 random(4);
  for (DType dtype : kWeightTypes) {
    for (ActivationPrecision precision : Precisions(dtype)) {
      for (int64_t rows : {1, 2, 3, 5, 8, 11}) {
        const int64_t n = 1 + random() % 90, k = 1 + random() % 600;
        const int64_t k_offset = random() % BlockColumns(dtype);
        SCOPED_TRACE(testing::Message() << Name(dtype, precision) << ": [" << rows << ", " << k
                                        << "] x [" << n << "] at " << k_offset);
        const TestWeight weight(dtype, n, k, k_offset, random);
        const std::vector<float> bias = RandomFloats(n, random);
        ExpectClose(Multiply(weight, RandomFloats(rows * k, random), rows, precision,
                             rows % 2 == 0 ? bias.data() : nullptr, 1));
      }
    }
  }
}

// The widest quants and activations there are: sums in 16 bits must not overflow.
TEST_P(LinearOnTarget, ExtremeQuantsDoNotOverflow) {
  std::mt19937 random(5);
  for (DType dtype : kBlockTypes) {
    SCOPED_TRACE(std::string(DTypeName(dtype)));
    for (uint8_t quant : {0x00, 0x80, 0xff, 0x7f}) {
      const int64_t n = 16, k = 512;
      const int64_t row_bytes = *RowBytes(dtype, k);
      std::vector<std::byte> bytes(n * row_bytes, std::byte{quant});
      const uint16_t one = FloatToFloat16(1.0f);
      for (int64_t at = 0; at < n * row_bytes; at += BlockBytes(dtype)) {
        for (int offset : Float16Offsets(dtype)) std::memcpy(&bytes[at + offset], &one, 2);
      }
      CpuDevice device;
      std::byte* data =
          device.Upload(std::vector<std::byte>(*PackedWeightBytesCpu({nullptr, dtype, n, k, 0})));
      const PackedWeight packed = {data, dtype, n, k, 0};
      ASSERT_TRUE(
          PackWeightCpu({bytes.data(), dtype, row_bytes, n, k, 0}, packed, device.stream()).ok());
      std::vector<float> row(k);
      ASSERT_TRUE(DequantiseRow(dtype, bytes.data(), k, row.data()).ok());
      for (float sign : {1.0f, -1.0f}) {
        const std::vector<float> x(k, sign * 127.0f);  // quants of +-127, scale 1
        std::vector<float> out(n);
        ASSERT_TRUE(LinearCpu({FloatMatrix(x.data(), 1, k), packed, nullptr,
                               FloatMatrix(out.data(), 1, n), ActivationPrecision::kInt8},
                              device.stream())
                        .ok());
        device.Synchronize();
        double exact = 0;
        for (float value : row) exact += static_cast<double>(x[0]) * value;
        for (float value : out) ASSERT_NEAR(value, exact, 1e-5 * (1 + std::fabs(exact)));
      }
    }
  }
}

// What the same matrix gives as float32.
std::vector<float> FloatProduct(const TestWeight& weight, const std::vector<float>& x,
                                int64_t rows) {
  const int64_t n = weight.rows().n, k = weight.rows().k;
  CpuDevice device;
  const WeightRows wide = {reinterpret_cast<const std::byte*>(weight.row(0)),
                           DType::kFloat32,
                           k * static_cast<int64_t>(sizeof(float)),
                           n,
                           k,
                           0};
  PackedWeight packed = {nullptr, DType::kFloat32, n, k, 0};
  packed.data = device.Upload(std::vector<std::byte>(*PackedWeightBytesCpu(packed)));
  EXPECT_TRUE(PackWeightCpu(wide, packed, device.stream()).ok());
  std::vector<float> out(rows * n, kNan);
  EXPECT_TRUE(
      LinearCpu({FloatMatrix(x.data(), rows, k), packed, nullptr, FloatMatrix(out.data(), rows, n)},
                device.stream())
          .ok());
  device.Synchronize();
  return out;
}

// Blocks as wide as those of real models and narrower than a step, cut by heads before the first
// row and the first column, and short at the end: whatever they are, float8 weights give the bits
// of the float32 matrix that they stand for.
TEST_P(LinearOnTarget, Float8HasTheBitsOfItsFloat32Matrix) {
  std::mt19937 random(11);
  const std::vector<ScaleBlock> blocks = {{128, 128, 0},  {128, 128, 77}, {16, 16, 6},
                                          {128, 24, 100}, {3, 1, 2},      {1, 7, 0},
                                          {5, 13, 4},     {24, 1000, 1}};
  for (const ScaleBlock& block : blocks) {
    for (const int64_t rows : {1, 2, 3, 5, 8, 9, 33, 96}) {
      if (rows > 9 && GetParam() == HWY_EMU128) continue;
      const int64_t n = 1 + random() % 150, k = 1 + random() % 400;
      const int64_t k_offset = random() % block.columns;
      SCOPED_TRACE(testing::Message() << "[" << rows << ", " << k << "] x [" << n << "], blocks ["
                                      << block.rows << ", " << block.columns << "] at ["
                                      << block.row_offset << ", " << k_offset << "]");
      const TestWeight weight(DType::kFloat8E4M3, n, k, k_offset, random, block);
      const std::vector<float> x = RandomFloats(rows * k, random);
      const Product product = Multiply(weight, x, rows, ActivationPrecision::kFloat32, nullptr, 1);
      ExpectClose(product);
      ASSERT_EQ(product.out, FloatProduct(weight, x, rows));
    }
  }
}

// Every code, subnormal ones too, times a scale that leaves it exact.
TEST_P(LinearOnTarget, EveryFloat8CodeIsWidenedExactly) {
  std::vector<std::byte> codes;
  std::vector<float> values;
  for (int bits = 0; bits < 256; ++bits) {
    if (IsFloat8E4M3Nan(static_cast<uint8_t>(bits))) continue;
    codes.push_back(static_cast<std::byte>(bits));
    values.push_back(Float8E4M3ToFloat(static_cast<uint8_t>(bits)));
  }
  const auto k = static_cast<int64_t>(codes.size());
  for (const int64_t block_columns : {int64_t{128}, int64_t{5}}) {
    for (const float scale : {1.0f, 0x1p-100f, 0x1p119f}) {
      const std::vector<float> scales(k, scale);
      const WeightRows rows = {
          codes.data(), DType::kFloat8E4M3, k, 1, k, 0, {scales.data(), k, 1, block_columns}};
      CpuDevice device;
      PackedWeight packed = {nullptr, DType::kFloat8E4M3, 1, k, 0, block_columns};
      packed.data = device.Upload(std::vector<std::byte>(*PackedWeightBytesCpu(packed)));
      ASSERT_TRUE(PackWeightCpu(rows, packed, device.stream()).ok());
      // Row i of x picks element i.
      std::vector<float> x(k * k, 0.0f), out(k, kNan);
      for (int64_t i = 0; i < k; ++i) x[i * k + i] = 1.0f;
      for (const bool at_once : {true, false}) {
        for (int64_t i = 0; i < (at_once ? 1 : k); ++i) {
          const int64_t count = at_once ? k : 1;
          ASSERT_TRUE(LinearCpu({FloatMatrix(&x[i * k], count, k), packed, nullptr,
                                 FloatMatrix(&out[i], count, 1)},
                                device.stream())
                          .ok());
        }
        device.Synchronize();
        for (int64_t i = 0; i < k; ++i) ASSERT_EQ(out[i], values[i] * scale) << i;
      }
    }
  }
}

std::vector<float> OneRow(const std::vector<float>& values, int64_t row, int64_t width) {
  return {values.begin() + row * width, values.begin() + (row + 1) * width};
}

TEST_P(LinearOnTarget, ARowsBitsDependOnNeitherBatchNorThreads) {
  std::mt19937 random(6);
  constexpr int64_t kRows = 203;
  for (DType dtype : kWeightTypes) {
    for (ActivationPrecision precision : Precisions(dtype)) {
      SCOPED_TRACE(Name(dtype, precision));
      // k spans several chunks, and n several tasks with a rest.
      const int64_t n = GetParam() == HWY_EMU128 ? 37 : 151,
                    k = GetParam() == HWY_EMU128 ? 300 : 1100;
      const TestWeight weight(dtype, n, k, IsQuantised(dtype) ? 5 : 0, random);
      const std::vector<float> x = RandomFloats(kRows * k, random);
      const std::vector<float> bias = RandomFloats(n, random);
      std::vector<std::vector<float>> alone(kRows);
      CpuDevice one(1);
      const PackedWeight packed = weight.Pack(one);
      const auto multiply = [&](CpuDevice& device, int64_t first, int64_t rows) {
        std::vector<float> out(rows * n, kNan);
        const LinearArgs args = {FloatMatrix(x.data() + first * k, rows, k), packed, bias.data(),
                                 FloatMatrix(out.data(), rows, n), precision};
        EXPECT_TRUE(LinearCpu(args, device.stream()).ok());
        device.Synchronize();
        return out;
      };
      for (int64_t row = 0; row < kRows; ++row) alone[row] = multiply(one, row, 1);
      for (int threads : {1, 2, 3}) {
        CpuDevice device(threads);
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64, 203}) {
          if (threads > 1 && rows > 3 && rows < 64 && GetParam() == HWY_EMU128) continue;
          const int64_t first = (kRows - rows) / 2;
          const std::vector<float> out = multiply(device, first, rows);
          for (int64_t r = 0; r < rows; ++r) {
            ASSERT_EQ(std::memcmp(out.data() + r * n, alone[first + r].data(), n * sizeof(float)),
                      0)
                << "row " << r << " of " << rows << " with " << threads << " threads";
          }
        }
      }
    }
  }
}

TEST_P(LinearOnTarget, AValueThatIsNotFiniteSpoilsItsRowAlone) {
  std::mt19937 random(7);
  for (DType dtype : kWeightTypes) {
    for (ActivationPrecision precision : Precisions(dtype)) {
      SCOPED_TRACE(Name(dtype, precision));
      const int64_t rows = 5, n = 20, k = 70;
      const TestWeight weight(dtype, n, k, 0, random);
      std::vector<float> x = RandomFloats(rows * k, random);
      const Product clean = Multiply(weight, x, rows, precision, nullptr, 1);
      for (float bad : {kNan, kInfinity, -kInfinity}) {
        for (int64_t position : {0, 31, 69}) {
          std::vector<float> spoilt = x;
          spoilt[2 * k + position] = bad;
          const Product product = Multiply(weight, spoilt, rows, precision, nullptr, 1);
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t i = 0; i < n; ++i) {
              const float value = product.out[r * n + i];
              if (r == 2) {
                // Infinity times a weight of zero is NaN, times another one infinite.
                EXPECT_FALSE(std::isfinite(value));
              } else {
                EXPECT_EQ(value, clean.out[r * n + i]);
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(LinearOnTarget, TinyActivationsDoNotBecomeNan) {
  std::mt19937 random(8);
  const TestWeight weight(DType::kQ4_1, 16, 64, 0, random);
  for (float tiny : {0.0f, 1e-45f, 1e-38f}) {
    const Product product =
        Multiply(weight, std::vector<float>(64, tiny), 1, ActivationPrecision::kInt8, nullptr, 1);
    for (float value : product.out) EXPECT_NEAR(value, 0.0f, 1e-35);
  }
}

// On CPUs with fused multiply-add all instruction sets work off the same chains.
TEST(LinearTargets, VectorLengthsGiveTheSameBits) {
  std::mt19937 random(9);
  std::vector<int64_t> targets = EveryTarget();
  targets.erase(targets.begin());  // The portable one does not fuse.
  for (DType dtype : kWeightTypes) {
    for (ActivationPrecision precision : Precisions(dtype)) {
      const TestWeight weight(dtype, 50, 333, 0, random);
      const std::vector<float> x = RandomFloats(7 * 333, random);
      std::vector<std::vector<float>> results;
      for (int64_t target : targets) {
        AllowTargets(target);
        results.push_back(Multiply(weight, x, 7, precision, nullptr, 1).out);
      }
      for (const std::vector<float>& result : results) {
        EXPECT_EQ(result, results[0]) << Name(dtype, precision);
      }
    }
  }
  AllowTargets(0);
}

TEST(Linear, RowsMayBeFarApart) {
  std::mt19937 random(10);
  CpuDevice device(2);
  const int64_t rows = 7, n = 21, k = 50, x_stride = 53, out_stride = 30;
  const TestWeight weight(DType::kBFloat16, n, k, 0, random);
  std::vector<float> x(rows * x_stride, kNan), out(rows * out_stride, -7.0f);
  std::vector<float> dense_x = RandomFloats(rows * k, random);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(&dense_x[r * k], k, &x[r * x_stride]);
  ASSERT_TRUE(LinearCpu({{x.data(), DType::kFloat32, rows, k, x_stride},
                         weight.Pack(device),
                         nullptr,
                         {out.data(), DType::kFloat32, rows, n, out_stride}},
                        device.stream())
                  .ok());
  device.Synchronize();
  const Product dense = Multiply(weight, dense_x, rows, ActivationPrecision::kFloat32, nullptr, 1);
  for (int64_t r = 0; r < rows; ++r) {
    EXPECT_EQ(OneRow(dense.out, r, n),
              std::vector<float>(&out[r * out_stride], &out[r * out_stride] + n));
    for (int64_t i = n; i < out_stride; ++i) EXPECT_EQ(out[r * out_stride + i], -7.0f);
  }
}

TEST(Linear, ZeroSizesAreLegal) {
  CpuDevice device(2);
  const std::vector<float> x(6, 1.0f), bias = {1, 2, 3};
  std::vector<float> out(6, kNan);
  for (DType dtype : kWeightTypes) {
    const auto linear = [&](int64_t rows, int64_t n, int64_t k, const float* b) {
      const absl::Status status = LinearCpu({FloatMatrix(x.data(), rows, k),
                                             {n * k == 0 ? nullptr : x.data(), dtype, n, k, 0, 16},
                                             b,
                                             FloatMatrix(out.data(), rows, n),
                                             Precisions(dtype).back()},
                                            device.stream());
      EXPECT_TRUE(status.ok()) << status;
      device.Synchronize();
    };
    linear(0, 3, 2, nullptr);
    linear(2, 0, 3, nullptr);
    EXPECT_TRUE(std::isnan(out[0]));
    linear(2, 3, 0, bias.data());
    EXPECT_EQ(out, (std::vector<float>{1, 2, 3, 1, 2, 3}));
    linear(2, 3, 0, nullptr);
    EXPECT_EQ(out, std::vector<float>(6, 0.0f));
    out.assign(6, kNan);
  }
}

TEST(Linear, RefusesWrongArguments) {
  CpuDevice device;
  float values[64] = {};
  const auto linear = [&](const LinearArgs& args) {
    return std::string(LinearCpu(args, device.stream()).message());
  };
  const PackedWeight weight = {values, DType::kFloat32, 2, 4, 0};
  EXPECT_THAT(linear({FloatMatrix(values, 3, 5), weight, nullptr, FloatMatrix(values, 3, 2)}),
              HasSubstr("linear: x is [3, 5], not [3, 4]"));
  EXPECT_THAT(linear({FloatMatrix(values, 3, 4), weight, nullptr, FloatMatrix(values, 3, 3)}),
              HasSubstr("linear: out is [3, 3], not [3, 2]"));
  EXPECT_THAT(linear({FloatMatrix(values, 3, 4), weight, nullptr, FloatMatrix(values, 3, 2),
                      ActivationPrecision::kInt8}),
              HasSubstr("int8 activations need block-quantised weights, not float32"));
  EXPECT_THAT(
      linear({{values, DType::kBFloat16, 3, 4, 4}, weight, nullptr, FloatMatrix(values, 3, 2)}),
      HasSubstr("x is bfloat16, not float32"));
  EXPECT_THAT(linear({FloatMatrix(values, 3, 4),
                      {nullptr, DType::kFloat32, 2, 4, 0},
                      nullptr,
                      FloatMatrix(values, 3, 2)}),
              HasSubstr("weight"));
  EXPECT_THAT(linear({FloatMatrix(values, 3, 4),
                      {values, DType::kInt8, 2, 4, 0},
                      nullptr,
                      FloatMatrix(values, 3, 2)}),
              HasSubstr("cannot be stored as int8"));
}

}  // namespace
}  // namespace heddle
