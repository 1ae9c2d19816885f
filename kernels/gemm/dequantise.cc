#include "kernels/gemm/dequantise.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/gemm/block_group.h"

namespace heddle {
namespace {

template <typename Bits>
Bits Load(const std::byte* row, int64_t i) {
  Bits bits;  // A row of a file may be unaligned.
  std::memcpy(&bits, row + i * sizeof(Bits), sizeof(Bits));
  return bits;
}

}  // namespace

absl::Status DequantiseRow(DType dtype, const std::byte* row, int64_t elements, float* out) {
  if (elements == 0) return absl::OkStatus();
  if (IsBlockQuantised(dtype)) {
    if (elements % BlockElements(dtype) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(elements, " elements are not whole blocks of ", DTypeName(dtype)));
    }
    for (int64_t first = 0; first < elements; first += kGroupElements) {
      DequantiseGroup(dtype, ReadBlockGroup(dtype, row, first), out + first);
    }
    return absl::OkStatus();
  }
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, row, elements * sizeof(float));
      return absl::OkStatus();
    case DType::kBFloat16:
      for (int64_t i = 0; i < elements; ++i) out[i] = BFloat16ToFloat(Load<uint16_t>(row, i));
      return absl::OkStatus();
    case DType::kFloat16:
      for (int64_t i = 0; i < elements; ++i) out[i] = Float16ToFloat(Load<uint16_t>(row, i));
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("weights cannot be stored as ", DTypeName(dtype)));
  }
}

absl::Status DequantiseRow(const WeightRows& rows, int64_t row, float* out) {
  const std::byte* data = rows.data + row * rows.row_stride_bytes;
  if (rows.dtype == DType::kFloat8E4M3) {
    const float* scales = rows.scales.Row(row);
    for (int64_t i = 0; i < rows.k; ++i) {
      const int64_t k = rows.k_offset + i;
      out[i] =
          Float8E4M3ToFloat(static_cast<uint8_t>(data[k])) * scales[k / rows.scales.block_columns];
    }
    return absl::OkStatus();
  }
  if (rows.k_offset != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a row begins at element ", rows.k_offset,
                                                   " of a block of ", DTypeName(rows.dtype)));
  }
  return DequantiseRow(rows.dtype, data, rows.k, out);
}

}  // namespace heddle
