// A weight with random contents: as a checkpoint's rows, as plain floats, and packed.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/gemm/dequantise.h"
#include "kernels/gemm/packed_weight.h"
#include "tests/kernels/cpu_device.h"

namespace heddle {

inline constexpr DType kPlainTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr DType kBlockTypes[] = {DType::kQ8_0, DType::kQ4_0, DType::kQ4_1, DType::kQ5_0,
                                        DType::kQ5_1, DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};
inline constexpr DType kWeightTypes[] = {
    DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kQ8_0, DType::kQ4_0, DType::kQ4_1,
    DType::kQ5_0,    DType::kQ5_1,     DType::kQ4_K,    DType::kQ5_K, DType::kQ6_K};

// Offsets of the f16 scales and minima in a block of a file.
inline std::vector<int> Float16Offsets(DType dtype) {
  switch (dtype) {
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {0, 2};
    case DType::kQ6_K:
      return {208};
    default:
      return {0};
  }
}

class TestWeight {
 public:
  TestWeight(DType dtype, int64_t n, int64_t k, int64_t k_offset, std::mt19937& random) {
    const int64_t block = BlockElements(dtype);
    const int64_t blocks = (k_offset + k + block - 1) / block;
    const int64_t row_bytes = blocks * BlockBytes(dtype);
    const int64_t stride = row_bytes + 6;  // rows need not be dense, nor aligned
    bytes_.resize(n * stride + 1);
    for (std::byte& byte : bytes_) byte = static_cast<std::byte>(random());
    values_.resize(n * k);
    std::vector<float> whole_row(blocks * block);
    for (int64_t row = 0; row < n; ++row) {
      std::byte* data = bytes_.data() + row * stride;
      FillRow(dtype, blocks, random, data);
      EXPECT_TRUE(DequantiseRow(dtype, data, blocks * block, whole_row.data()).ok());
      std::copy_n(whole_row.begin() + k_offset, k, values_.begin() + row * k);
    }
    rows_ = {bytes_.data(), dtype, stride, n, k, k_offset};
  }

  const WeightRows& rows() const { return rows_; }
  // Element [n, k] as DequantiseRow reads it.
  float at(int64_t n, int64_t k) const { return values_[n * rows_.k + k]; }
  const float* row(int64_t n) const { return values_.data() + n * rows_.k; }

  // Packed in memory of `device`, of exactly the bytes it asks for.
  PackedWeight Pack(CpuDevice& device) const {
    const auto bytes =
        device.kernels().packed_weight_bytes(rows_.dtype, rows_.n, rows_.k, rows_.k_offset);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    // All ones: what packing leaves unwritten would be NaN.
    std::byte* data = device.Upload(std::vector<std::byte>(*bytes, std::byte{0xff}));
    const PackedWeight packed = {data, rows_.dtype, rows_.n, rows_.k, rows_.k_offset};
    EXPECT_TRUE(device.kernels().pack_weight(rows_, packed, device.stream()).ok());
    device.Synchronize();
    return packed;
  }

 private:
  // Overwrites random bytes where they would not be moderate floats.
  static void FillRow(DType dtype, int64_t blocks, std::mt19937& random, std::byte* data) {
    std::normal_distribution<float> normal(0.0f, 0.1f);
    for (int64_t block = 0; block < blocks; ++block, data += BlockBytes(dtype)) {
      if (dtype == DType::kFloat32) {
        const float value = normal(random);
        std::memcpy(data, &value, sizeof(value));
        continue;
      }
      for (int offset : Float16Offsets(dtype)) {
        const uint16_t bits = dtype == DType::kBFloat16 ? FloatToBFloat16(normal(random))
                                                        : FloatToFloat16(normal(random));
        std::memcpy(data + offset, &bits, sizeof(bits));
      }
    }
  }

  std::vector<std::byte> bytes_;
  std::vector<float> values_;  // [n, k]
  WeightRows rows_;
};

}  // namespace heddle
