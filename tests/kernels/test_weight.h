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
inline constexpr DType kWeightTypes[] = {DType::kFloat32,    DType::kBFloat16, DType::kFloat16,
                                         DType::kFloat8E4M3, DType::kQ8_0,     DType::kQ4_0,
                                         DType::kQ4_1,       DType::kQ5_0,     DType::kQ5_1,
                                         DType::kQ4_K,       DType::kQ5_K,     DType::kQ6_K};

// Of float8: neither divides the other, a panel or a step of k.
struct ScaleBlock {
  int64_t rows = 7, columns = 20, row_offset = 3;
};

// Elements of k that share a scale; 1 where there is none.
inline int64_t BlockColumns(DType dtype) {
  return dtype == DType::kFloat8E4M3 ? ScaleBlock().columns : BlockElements(dtype);
}

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
  // `scale_block` is of use for float8 alone.
  TestWeight(DType dtype, int64_t n, int64_t k, int64_t k_offset, std::mt19937& random,
             const ScaleBlock& scale_block = {}) {
    if (dtype == DType::kFloat8E4M3) {
      FillFloat8(n, k, k_offset, scale_block, random);
      return;
    }
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
  // What it is packed as, yet without data.
  PackedWeight shape() const {
    return {nullptr, rows_.dtype, rows_.n, rows_.k, rows_.k_offset, rows_.scales.block_columns};
  }
  // Element [n, k] as DequantiseRow reads it.
  float at(int64_t n, int64_t k) const { return values_[n * rows_.k + k]; }
  const float* row(int64_t n) const { return values_.data() + n * rows_.k; }

  // Packed in memory of `device`, of exactly the bytes it asks for.
  PackedWeight Pack(CpuDevice& device) const {
    PackedWeight packed = shape();
    const auto bytes = device.kernels().packed_weight_bytes(packed);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    // All ones: what packing leaves unwritten would be NaN.
    packed.data = device.Upload(std::vector<std::byte>(*bytes, std::byte{0xff}));
    EXPECT_TRUE(device.kernels().pack_weight(rows_, packed, device.stream()).ok());
    device.Synchronize();
    return packed;
  }

 private:
  // Random codes and scales, whose magnitudes differ widely.
  void FillFloat8(int64_t n, int64_t k, int64_t k_offset, const ScaleBlock& block,
                  std::mt19937& random) {
    const int64_t stride = k_offset + k + 5;
    bytes_.resize(n * stride + 1);
    for (std::byte& byte : bytes_) {
      do byte = static_cast<std::byte>(random());
      while (IsFloat8E4M3Nan(static_cast<uint8_t>(byte)));
    }
    const int64_t scale_rows = (block.row_offset + n + block.rows - 1) / block.rows;
    const int64_t scale_stride = (k_offset + k + block.columns - 1) / block.columns + 2;
    scales_.resize(scale_rows * scale_stride);
    for (float& scale : scales_) {
      scale = std::exp2(std::uniform_real_distribution<float>(-12.0f, -8.0f)(random));
    }
    rows_ = {bytes_.data(),
             DType::kFloat8E4M3,
             stride,
             n,
             k,
             k_offset,
             {scales_.data(), scale_stride, block.rows, block.columns, block.row_offset}};
    values_.resize(n * k);
    for (int64_t row = 0; row < n; ++row) {
      EXPECT_TRUE(DequantiseRow(rows_, row, values_.data() + row * k).ok());
    }
  }

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
  std::vector<float> scales_;
  std::vector<float> values_;  // [n, k]
  WeightRows rows_;
};

}  // namespace heddle
