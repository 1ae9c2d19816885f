#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/embedding/embedding_cpu.h"
#include "kernels/gemm/linear_cpu.h"
#include "tests/kernels/test_weight.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int64_t n, k, k_offset;
};

std::vector<Shape> Shapes(DType dtype) {
  std::vector<Shape> shapes = {{1, 1, 0},    {16, 32, 0},  {17, 64, 0}, {5, 33, 0},
                               {35, 300, 0}, {48, 256, 0}, {3, 7, 0}};
  if (IsQuantised(dtype)) {
    // First and last blocks cut by the neighbours' heads.
    for (int64_t k_offset :
         {int64_t{1}, int64_t{16}, std::min<int64_t>(BlockColumns(dtype), 32) - 1}) {
      shapes.push_back({19, 32, k_offset});
      shapes.push_back({4, 1, k_offset});
      shapes.push_back({33, 320, k_offset});
    }
  }
  if (BlockElements(dtype) == 256) {
    for (int64_t k_offset : {32, 64, 100, 192, 255}) {
      shapes.push_back({18, 64, k_offset});
      shapes.push_back({2, 700, k_offset});
    }
  }
  return shapes;
}

// The embedding reads rows back out of the layout that products use.
TEST(Pack, EveryElementOfEveryTypeIsReadBack) {
  std::mt19937 random(1);
  for (DType dtype : kWeightTypes) {
    for (const auto& [n, k, k_offset] : Shapes(dtype)) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " [" << n << ", " << k << "] at " << k_offset);
      CpuDevice device(2);
      const TestWeight weight(dtype, n, k, k_offset, random);
      const PackedWeight packed = weight.Pack(device);
      std::vector<int32_t> ids(n);
      for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>(n - 1 - i);
      float* out = device.Upload(std::vector<float>(n * k, kNan));
      ASSERT_TRUE(
          EmbeddingCpu({packed, device.Upload(ids), 0, FloatMatrix(out, n, k)}, device.stream())
              .ok());
      device.Synchronize();
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < k; ++j) {
          ASSERT_EQ(out[i * k + j], weight.at(n - 1 - i, j)) << i << ", " << j;
        }
      }
    }
  }
}

TEST(Pack, TakesAboutTheBytesOfTheFile) {
  for (DType dtype : kWeightTypes) {
    const int64_t file = 4096 * *RowBytes(dtype, 4096);
    const int64_t packed = *PackedWeightBytesCpu({nullptr, dtype, 4096, 4096, 0, 128});
    EXPECT_GE(packed, file) << DTypeName(dtype);
    EXPECT_LE(packed, file * 104 / 100) << DTypeName(dtype);
  }
}

TEST(Pack, PlainTypesConvertToNearestEven) {
  std::mt19937 random(2);
  CpuDevice device;
  const TestWeight weight(DType::kFloat32, 18, 37, 0, random);
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::byte* data =
        device.Upload(std::vector<std::byte>(*PackedWeightBytesCpu({nullptr, dtype, 18, 37, 0})));
    const PackedWeight packed = {data, dtype, 18, 37, 0};
    ASSERT_TRUE(PackWeightCpu(weight.rows(), packed, device.stream()).ok());
    const int32_t id = 17;
    std::vector<float> out(37);
    ASSERT_TRUE(
        EmbeddingCpu({packed, &id, 0, FloatMatrix(out.data(), 1, 37)}, device.stream()).ok());
    device.Synchronize();
    for (int64_t k = 0; k < 37; ++k) {
      const float value = weight.at(17, k);
      EXPECT_EQ(out[k], dtype == DType::kBFloat16 ? BFloat16ToFloat(FloatToBFloat16(value))
                                                  : Float16ToFloat(FloatToFloat16(value)));
    }
  }
}

TEST(Pack, NamesTheFirstElementThatOverflows) {
  CpuDevice device(3);
  std::vector<float> values(100 * 40, 1.0f);
  values[0] = std::numeric_limits<float>::infinity();  // infinite already
  values[70 * 40 + 9] = 70000.0f;
  values[70 * 40 + 8] = -65520.0f;
  values[99 * 40 + 1] = 1e30f;
  const WeightRows rows = {
      reinterpret_cast<const std::byte*>(values.data()), DType::kFloat32, 160, 100, 40, 0};
  std::byte* data = device.Upload(
      std::vector<std::byte>(*PackedWeightBytesCpu({nullptr, DType::kFloat16, 100, 40, 0})));
  ASSERT_TRUE(PackWeightCpu(rows, {data, DType::kFloat16, 100, 40, 0}, device.stream()).ok());
  const absl::Status status = device.stream().Synchronize();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(status.message(), HasSubstr("element [70, 8] = -65520 is too large for float16"));

  values[70 * 40 + 8] = values[70 * 40 + 9] = 65519.0f;  // rounds down
  values[99 * 40 + 1] = 0.0f;
  ASSERT_TRUE(PackWeightCpu(rows, {data, DType::kFloat16, 100, 40, 0}, device.stream()).ok());
  EXPECT_TRUE(device.stream().Synchronize().ok());

  values[5 * 40] = std::numeric_limits<float>::max();
  ASSERT_TRUE(PackWeightCpu(rows, {data, DType::kBFloat16, 100, 40, 0}, device.stream()).ok());
  EXPECT_THAT(device.stream().Synchronize().message(),
              HasSubstr("element [5, 0] = 3.40282e+38 is too large for bfloat16"));
}

TEST(Pack, NamesTheFirstCodeThatIsNan) {
  CpuDevice device(3);
  std::vector<std::byte> codes(50 * 40, std::byte{0x38});
  const std::vector<float> scales(16, 1.0f);
  const WeightRows rows = {
      codes.data(), DType::kFloat8E4M3, 40, 50, 36, 4, {scales.data(), 3, 16, 16}};
  PackedWeight packed = {nullptr, DType::kFloat8E4M3, 50, 36, 4, 16};
  packed.data = device.Upload(std::vector<std::byte>(*PackedWeightBytesCpu(packed)));
  codes[41 * 40] = std::byte{0x7f};  // the neighbour's
  ASSERT_TRUE(PackWeightCpu(rows, packed, device.stream()).ok());
  EXPECT_TRUE(device.stream().Synchronize().ok());
  codes[41 * 40 + 4 + 35] = std::byte{0x7f};
  codes[41 * 40 + 4 + 9] = std::byte{0xff};
  codes[49 * 40 + 4] = std::byte{0xff};
  ASSERT_TRUE(PackWeightCpu(rows, packed, device.stream()).ok());
  const absl::Status status = device.stream().Synchronize();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("element [41, 9] is NaN"));
}

TEST(Pack, RefusesScalesThatDoNotFit) {
  CpuDevice device;
  const std::vector<std::byte> codes(64);
  const std::vector<float> scales(64, 1.0f);
  const auto pack = [&](const BlockScales& blocks, int64_t k_offset, int64_t block_columns) {
    const WeightRows rows = {codes.data(), DType::kFloat8E4M3, 8, 8, 4, k_offset, blocks};
    return std::string(
        PackWeightCpu(rows, {codes.data(), DType::kFloat8E4M3, 8, 4, k_offset, block_columns},
                      device.stream())
            .message());
  };
  EXPECT_THAT(pack({scales.data(), 4, 2, 3}, 0, 4),
              HasSubstr("blocks [2, 3] from row 0 on, for a weight in blocks of 4 columns"));
  EXPECT_THAT(pack({scales.data(), 4, 0, 3}, 0, 3), HasSubstr("blocks [0, 3]"));
  EXPECT_THAT(pack({scales.data(), 4, 2, 3, 2}, 0, 3), HasSubstr("from row 2 on"));
  EXPECT_THAT(pack({nullptr, 4, 2, 3}, 0, 3), HasSubstr("float8 weights without scales"));
  EXPECT_THAT(pack({scales.data(), 1, 2, 3}, 2, 3),
              HasSubstr("rows of 2 scales overlap: the stride is 1"));
  EXPECT_THAT(pack({scales.data(), 4, 2, 3}, 3, 3),
              HasSubstr("k_offset 3 is outside a block of 3"));
  EXPECT_THAT(pack({scales.data(), 4, 2, 0}, 0, 0), HasSubstr("in blocks of 0 columns"));
}

TEST(Pack, RefusesWhatDoesNotFit) {
  CpuDevice device;
  const auto pack = [&](const WeightRows& rows, const PackedWeight& target) {
    return std::string(PackWeightCpu(rows, target, device.stream()).message());
  };
  std::byte bytes[4096] = {};
  EXPECT_THAT(pack({bytes, DType::kQ8_0, 34, 2, 32, 0}, {bytes, DType::kBFloat16, 2, 32, 0}),
              HasSubstr("stored as Q8_0 cannot be held as bfloat16"));
  EXPECT_THAT(pack({bytes, DType::kFloat8E4M3, 32, 2, 32, 0}, {bytes, DType::kFloat32, 2, 32, 0}),
              HasSubstr("stored as float8_e4m3 cannot be held as float32"));
  EXPECT_THAT(pack({bytes, DType::kFloat32, 128, 2, 32, 0}, {bytes, DType::kFloat32, 2, 31, 0}),
              HasSubstr("[2, 32] at 0 do not fill a weight of [2, 31] at 0"));
  EXPECT_THAT(pack({bytes, DType::kQ8_0, 34, 2, 33, 31}, {bytes, DType::kQ8_0, 2, 33, 31}),
              HasSubstr("rows of 68 bytes overlap: the stride is 34"));
  EXPECT_THAT(pack({bytes, DType::kQ8_0, 34, 2, 1, 32}, {bytes, DType::kQ8_0, 2, 1, 32}),
              HasSubstr("k_offset 32 is outside a block of 32"));
  EXPECT_THAT(pack({bytes, DType::kFloat32, 8, 2, 1, 1}, {bytes, DType::kFloat32, 2, 1, 1}),
              HasSubstr("k_offset 1 is outside a block of 1"));
  EXPECT_THAT(PackedWeightBytesCpu({nullptr, DType::kInt32, 1, 1, 0}).status().message(),
              HasSubstr("cannot be stored as int32"));
  const int64_t huge = int64_t{1} << 40;
  EXPECT_THAT(PackedWeightBytesCpu({nullptr, DType::kFloat32, huge, huge, 0}).status().message(),
              HasSubstr("overflows"));
  EXPECT_FALSE(PackedWeightBytesCpu({nullptr, DType::kFloat32, -1, 1, 0}).ok());
  EXPECT_FALSE(
      PackedWeightBytesCpu({nullptr, DType::kFloat32, 1, std::numeric_limits<int64_t>::max(), 0})
          .ok());
  EXPECT_EQ(*PackedWeightBytesCpu({nullptr, DType::kFloat32, 0, 8, 0}), 0);
  EXPECT_EQ(*PackedWeightBytesCpu({nullptr, DType::kQ4_K, 8, 0, 0}), 0);
}

TEST(Embedding, IdsOutsideTheShardAreZeros) {
  std::mt19937 random(3);
  CpuDevice device(2);
  const TestWeight weight(DType::kQ4_1, 20, 96, 0, random);
  const std::vector<int32_t> ids = {99, 100, 119, 120, 0, 110};
  constexpr int64_t kStride = 100;
  std::vector<float> out(ids.size() * kStride, kNan);
  const MatrixView view = {out.data(), DType::kFloat32, static_cast<int64_t>(ids.size()), 96,
                           kStride};
  ASSERT_TRUE(EmbeddingCpu({weight.Pack(device), ids.data(), 100, view}, device.stream()).ok());
  device.Synchronize();
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool ours = ids[i] >= 100 && ids[i] < 120;
    for (int64_t k = 0; k < 96; ++k) {
      EXPECT_EQ(out[i * kStride + k], ours ? weight.at(ids[i] - 100, k) : 0.0f);
    }
    for (int64_t k = 96; k < kStride; ++k) EXPECT_TRUE(std::isnan(out[i * kStride + k]));
  }
}

TEST(Embedding, AnEmptyShardAndNoTokensAreLegal) {
  CpuDevice device;
  const int32_t id = 3;
  std::vector<float> out(8, kNan);
  const PackedWeight empty = {nullptr, DType::kBFloat16, 0, 8, 0};
  ASSERT_TRUE(EmbeddingCpu({empty, &id, 0, FloatMatrix(out.data(), 1, 8)}, device.stream()).ok());
  ASSERT_TRUE(
      EmbeddingCpu({empty, nullptr, 0, FloatMatrix(out.data(), 0, 8)}, device.stream()).ok());
  device.Synchronize();
  EXPECT_EQ(out, std::vector<float>(8, 0.0f));
}

TEST(Embedding, RefusesRowsOfAnotherWidth) {
  CpuDevice device;
  const int32_t id = 0;
  float values[8] = {};
  const PackedWeight table = {values, DType::kFloat32, 1, 8, 0};
  EXPECT_THAT(EmbeddingCpu({table, &id, 0, FloatMatrix(values, 1, 4)}, device.stream()).message(),
              HasSubstr("embedding: out is [1, 4], not [1, 8]"));
  EXPECT_THAT(EmbeddingCpu({table, &id, -1, FloatMatrix(values, 1, 8)}, device.stream()).message(),
              HasSubstr("first id -1"));
  EXPECT_THAT(
      EmbeddingCpu({table, nullptr, 0, FloatMatrix(values, 1, 8)}, device.stream()).message(),
      HasSubstr("token_ids"));
}

}  // namespace
}  // namespace heddle
