// What GGUF's blocks mean, against the readings of the `gguf` package.
#include "kernels/gemm/dequantise.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using testing::HasSubstr;

struct Record {
  DType dtype;
  std::vector<std::byte> blocks;
  std::vector<float> values;
};

std::vector<Record> ReadRecords() {
  std::ifstream file(HEDDLE_TESTS_DIR "/golden/gguf_blocks.bin", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<Record> records;
  for (size_t position = 0; position < bytes.size();) {
    const std::string name = bytes.substr(position, 8).c_str();
    uint32_t sizes[2];
    std::memcpy(sizes, bytes.data() + position + 8, sizeof(sizes));
    position += 16;
    Record record{*ParseDType(name), std::vector<std::byte>(sizes[0]),
                  std::vector<float>(sizes[1])};
    std::memcpy(record.blocks.data(), bytes.data() + position, sizes[0]);
    std::memcpy(record.values.data(), bytes.data() + position + sizes[0], sizes[1] * 4);
    position += sizes[0] + sizes[1] * 4;
    records.push_back(std::move(record));
  }
  return records;
}

TEST(Dequantise, ReadsWhatGgufReads) {
  const std::vector<Record> records = ReadRecords();
  ASSERT_EQ(records.size(), 8u);
  for (const Record& record : records) {
    SCOPED_TRACE(std::string(DTypeName(record.dtype)));
    const auto elements = static_cast<int64_t>(record.values.size());
    ASSERT_EQ(*RowBytes(record.dtype, elements), static_cast<int64_t>(record.blocks.size()));
    std::vector<float> values(elements);
    ASSERT_TRUE(DequantiseRow(record.dtype, record.blocks.data(), elements, values.data()).ok());
    for (int64_t i = 0; i < elements; ++i) ASSERT_EQ(values[i], record.values[i]) << i;
  }
}

// One block of each kind by hand, so that the fixture is not the only witness.
TEST(Dequantise, ReadsHandMadeBlocks) {
  std::vector<std::byte> q4_1(20, std::byte{0});
  const uint16_t scale = FloatToFloat16(0.5f), minimum = FloatToFloat16(-3.0f);
  std::memcpy(q4_1.data(), &scale, 2);
  std::memcpy(q4_1.data() + 2, &minimum, 2);
  q4_1[4] = std::byte{0xf2};   // elements 0 and 16
  q4_1[19] = std::byte{0x1e};  // elements 15 and 31
  float values[32];
  ASSERT_TRUE(DequantiseRow(DType::kQ4_1, q4_1.data(), 32, values).ok());
  EXPECT_EQ(values[0], -2.0f);
  EXPECT_EQ(values[16], 4.5f);
  EXPECT_EQ(values[15], 4.0f);
  EXPECT_EQ(values[31], -2.5f);
  EXPECT_EQ(values[1], -3.0f);

  std::vector<std::byte> q8_0(34, std::byte{0x80});  // quants of -128
  std::memcpy(q8_0.data(), &scale, 2);
  ASSERT_TRUE(DequantiseRow(DType::kQ8_0, q8_0.data(), 32, values).ok());
  for (float value : values) EXPECT_EQ(value, -64.0f);
}

TEST(Dequantise, RefusesWhatIsNoRowOfWeights) {
  std::byte bytes[64] = {};
  float values[32];
  EXPECT_THAT(DequantiseRow(DType::kQ4_K, bytes, 32, values).message(),
              HasSubstr("32 elements are not whole blocks of Q4_K"));
  EXPECT_THAT(DequantiseRow(DType::kInt32, bytes, 1, values).message(),
              HasSubstr("cannot be stored as int32"));
  EXPECT_TRUE(DequantiseRow(DType::kFloat32, nullptr, 0, nullptr).ok());
}

}  // namespace
}  // namespace heddle
