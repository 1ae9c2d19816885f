#include "runtime/checkpoint/block_fp8.h"

#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/dequantise.h"

namespace heddle {
namespace {

constexpr float kLargestCode = 448.0f;

// The blocks that hold elements [range.begin, range.end).
Range BlocksOf(Range range, int64_t block) {
  return {range.begin / block, (range.end + block - 1) / block};
}

}  // namespace

std::string ScaleTensorName(absl::string_view matrix) { return absl::StrCat(matrix, "_scale_inv"); }

void CheckScaleTensor(const StoredTensor& matrix, const StoredTensor& scales,
                      const BlockFp8Spec& blocks, std::vector<std::string>& problems) {
  const std::vector<int64_t> expected = {BlocksOf({0, matrix.shape[0]}, blocks.block_rows).end,
                                         BlocksOf({0, matrix.shape[1]}, blocks.block_columns).end};
  if (scales.shape != expected) {
    problems.push_back(absl::StrCat("tensor ", scales.name, " is ", ShapeName(scales.shape),
                                    ", expected ", ShapeName(expected), ": ", matrix.name, " ",
                                    ShapeName(matrix.shape), " is in blocks of ",
                                    ShapeName({blocks.block_rows, blocks.block_columns})));
  }
  if (!scales.dtype || !IsFloatingPoint(*scales.dtype)) {
    problems.push_back(absl::StrCat("tensor ", scales.name, " is stored as ", scales.type_name,
                                    ", which is not supported for scales"));
  }
}

absl::StatusOr<BlockScales> ReadScales(const MappedTensor& scales, const BlockFp8Spec& blocks,
                                       Range rows, Range cols, std::vector<float>& values) {
  const Range block_rows = BlocksOf(rows, blocks.block_rows);
  const Range block_cols = BlocksOf(cols, blocks.block_columns);
  const StoredTensor& stored = scales.stored;
  const int64_t element_bytes = BlockBytes(*stored.dtype);
  const char* data = scales.file->contents().data() + stored.offset;
  values.resize(block_rows.size() * block_cols.size());
  float* out = values.data();
  for (int64_t row = block_rows.begin; row < block_rows.end; ++row) {
    const char* first = data + (row * stored.shape[1] + block_cols.begin) * element_bytes;
    RETURN_IF_ERROR(DequantiseRow(*stored.dtype, reinterpret_cast<const std::byte*>(first),
                                  block_cols.size(), out));
    for (int64_t col = block_cols.begin; col < block_cols.end; ++col, ++out) {
      if (*out >= 0 && std::isfinite(*out * kLargestCode)) continue;
      return absl::InvalidArgumentError(absl::StrCat(stored.name, "[", row, ", ", col, "] is ",
                                                     *out,
                                                     ", which is no scale of float8 weights"));
    }
  }
  return BlockScales{.data = values.data(),
                     .stride = block_cols.size(),
                     .block_rows = blocks.block_rows,
                     .block_columns = blocks.block_columns,
                     .row_offset = rows.begin % blocks.block_rows};
}

absl::Status CheckCodes(absl::string_view name, const WeightRows& rows, int64_t first_row,
                        int64_t first_column) {
  for (int64_t row = 0; row < rows.n; ++row) {
    const auto* codes =
        reinterpret_cast<const uint8_t*>(rows.data) + row * rows.row_stride_bytes + rows.k_offset;
    int64_t num_nans = 0;  // without a branch in the loop, which is then a few bytes a cycle
    for (int64_t k = 0; k < rows.k; ++k) num_nans += IsFloat8E4M3Nan(codes[k]) ? 1 : 0;
    if (num_nans == 0) continue;
    int64_t k = 0;
    while (!IsFloat8E4M3Nan(codes[k])) ++k;
    return absl::InvalidArgumentError(
        absl::StrCat(name, "[", first_row + row, ", ", first_column + k, "] is NaN"));
  }
  return absl::OkStatus();
}

}  // namespace heddle
