// Packing reads each block of the checkpoint once and writes each panel once, at load: for a panel
// 16 rows of n are read side by side.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/dequantise.h"
#include "kernels/gemm/linear_cpu.h"
#include "kernels/gemm/packed_layout.h"

namespace heddle {
namespace {

// [column] of the vector that holds group `group`'s quants of one column, for each of its elements.
void PackQuants(DType dtype, const BlockGroup& group, int column, uint8_t* target) {
  constexpr int kVectorBytes = kPanelColumns * 4;
  const BlockTraits traits = BlockTraitsOf(dtype);
  for (int i = 0; i < kGroupElements; ++i) {
    const int vector = i / 4;
    const int byte = column * 4 + i % 4;
    const uint8_t quant = group.quants[i];
    if (traits.low_bits == 8) {
      target[vector * kVectorBytes + byte] = quant;
      continue;
    }
    target[vector % 4 * kVectorBytes + byte] |= (quant & 15) << (vector / 4 * 4);
    uint8_t* high = target + 4 * kVectorBytes + byte;
    if (traits.high_bits == 1) *high |= (quant >> 4) << vector;
    if (traits.high_bits == 2) high[vector / 4 * kVectorBytes] |= (quant >> 4) << vector % 4 * 2;
  }
}

void PackScales(DType dtype, const BlockGroup& group, int column, std::byte* target) {
  const BlockTraits traits = BlockTraitsOf(dtype);
  if (traits.is_k_quant) {
    auto* factors = reinterpret_cast<uint8_t*>(target);
    factors[column] = static_cast<uint8_t>(group.scale_factor[0]);
    factors[kPanelColumns + column] =
        traits.has_minimum ? group.minimum_factor : static_cast<uint8_t>(group.scale_factor[1]);
  } else {
    auto* scales = reinterpret_cast<uint16_t*>(target);
    scales[column] = group.scale;
    if (traits.has_minimum) scales[kPanelColumns + column] = group.minimum;
  }
}

void PackSuperScales(DType dtype, const BlockGroup& group, int column, int64_t block,
                     std::byte* target) {
  const bool has_minimum = BlockTraitsOf(dtype).has_minimum;
  auto* scales =
      reinterpret_cast<uint16_t*>(target) + block * kPanelColumns * (has_minimum ? 2 : 1);
  scales[column] = group.scale;
  if (has_minimum) scales[kPanelColumns + column] = group.minimum;
}

void PackBlockPanel(const WeightRows& rows, const PackedLayout& layout, int64_t panel,
                    std::byte* target) {
  const DType dtype = rows.dtype;
  std::memset(target, 0, layout.panel_bytes);
  const int64_t first_row = panel * kPanelColumns;
  const int columns = static_cast<int>(std::min<int64_t>(kPanelColumns, rows.n - first_row));
  // The checkpoint's element, counted from the start of `data`, with which our first group begins.
  const int64_t first_element = rows.k_offset - layout.lead;
  for (int column = 0; column < columns; ++column) {
    const std::byte* row = rows.data + (first_row + column) * rows.row_stride_bytes;
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      const BlockGroup group = ReadBlockGroup(dtype, row, first_element + g * kGroupElements);
      PackQuants(
          dtype, group, column,
          reinterpret_cast<uint8_t*>(target) + layout.quants_offset + g * GroupQuantBytes(dtype));
      PackScales(dtype, group, column, target + layout.scales_offset + g * GroupScaleBytes(dtype));
      if (BlockTraitsOf(dtype).is_k_quant) {
        PackSuperScales(dtype, group, column, (layout.first_group + g) / kSuperGroups, target);
      }
    }
  }
}

// Writes one element of a plain panel. False if a finite value became infinite.
bool PackPlainElement(float value, DType dtype, int64_t k, int column, std::byte* panel) {
  auto* halves = reinterpret_cast<uint16_t*>(panel);
  switch (dtype) {
    case DType::kBFloat16: {
      const uint16_t bits = FloatToBFloat16(value);
      halves[PairIndex(k, column)] = bits;
      return std::isinf(value) || !std::isinf(BFloat16ToFloat(bits));
    }
    case DType::kFloat16: {
      const uint16_t bits = FloatToFloat16(value);
      halves[k * kPanelColumns + column] = bits;
      return std::isinf(value) || !std::isinf(Float16ToFloat(bits));
    }
    default:
      reinterpret_cast<float*>(panel)[k * kPanelColumns + column] = value;
      return true;
  }
}

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the first element (row * k + column of W) that became infinite, or kNone.
int64_t PackPlainPanel(const WeightRows& rows, DType dtype, const PackedLayout& layout,
                       int64_t panel, std::byte* target) {
  std::memset(target, 0, layout.panel_bytes);
  const int64_t first_row = panel * kPanelColumns;
  const int columns = static_cast<int>(std::min<int64_t>(kPanelColumns, rows.n - first_row));
  constexpr int64_t kPiece = 256;
  float values[kPiece];
  for (int column = 0; column < columns; ++column) {
    const int64_t row = first_row + column;
    for (int64_t k = 0; k < rows.k; k += kPiece) {
      const int64_t count = std::min(kPiece, rows.k - k);
      const std::byte* source =
          rows.data + row * rows.row_stride_bytes + k * BlockBytes(rows.dtype);
      if (!DequantiseRow(rows.dtype, source, count, values).ok()) return row * rows.k + k;
      for (int64_t i = 0; i < count; ++i) {
        if (!PackPlainElement(values[i], dtype, k + i, column, target)) return row * rows.k + k + i;
      }
    }
  }
  return kNone;
}

// Returns the first element that is NaN, or kNone.
int64_t PackFloat8Panel(const WeightRows& rows, const PackedLayout& layout, int64_t panel,
                        std::byte* target) {
  std::memset(target, 0, layout.panel_bytes);
  const int64_t first_row = panel * kPanelColumns;
  const int columns = static_cast<int>(std::min<int64_t>(kPanelColumns, rows.n - first_row));
  auto* scales = reinterpret_cast<float*>(target);
  const int64_t num_blocks = DivideUp(rows.k_offset + rows.k, layout.block_columns);
  for (int column = 0; column < columns; ++column) {
    const int64_t row = first_row + column;
    for (int64_t block = 0; block < num_blocks; ++block) {
      scales[block * kPanelColumns + column] = rows.scales.Row(row)[block];
    }
    const std::byte* codes = rows.data + row * rows.row_stride_bytes + rows.k_offset;
    std::byte* packed = target + layout.quants_offset;
    for (int64_t k = 0; k < rows.k; ++k) {
      if (IsFloat8E4M3Nan(static_cast<uint8_t>(codes[k]))) return row * rows.k + k;
      packed[PairIndex(layout.lead + k, column)] = codes[k];
    }
  }
  return kNone;
}

absl::Status ValidateScales(const WeightRows& rows, const PackedWeight& target) {
  const BlockScales& scales = rows.scales;
  if (scales.block_columns != target.block_columns || scales.block_rows < 1 ||
      scales.row_offset < 0 || scales.row_offset >= scales.block_rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "scales of blocks [", scales.block_rows, ", ", scales.block_columns, "] from row ",
        scales.row_offset, " on, for a weight in blocks of ", target.block_columns, " columns"));
  }
  if (rows.n == 0 || rows.k == 0) return absl::OkStatus();
  if (scales.data == nullptr) return absl::InvalidArgumentError("float8 weights without scales");
  const int64_t blocks = DivideUp(rows.k_offset + rows.k, scales.block_columns);
  if (scales.row_offset + rows.n > scales.block_rows && scales.stride < blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows of ", blocks, " scales overlap: the stride is ", scales.stride));
  }
  return absl::OkStatus();
}

absl::Status Validate(const WeightRows& rows, const PackedWeight& target) {
  if (rows.n != target.n || rows.k != target.k || rows.k_offset != target.k_offset) {
    return absl::InvalidArgumentError(absl::StrCat(
        "weight rows [", rows.n, ", ", rows.k, "] at ", rows.k_offset, " do not fill a weight of [",
        target.n, ", ", target.k, "] at ", target.k_offset));
  }
  RETURN_IF_ERROR(PackedLayout::Create(target).status());
  if (rows.dtype != target.dtype &&
      !(IsFloatingPoint(rows.dtype) && IsFloatingPoint(target.dtype))) {
    return absl::InvalidArgumentError(absl::StrCat("weights stored as ", DTypeName(rows.dtype),
                                                   " cannot be held as ", DTypeName(target.dtype)));
  }
  const int64_t block = BlockElements(rows.dtype);
  const int64_t row_bytes = DivideUp(rows.k_offset + rows.k, block) * BlockBytes(rows.dtype);
  if (rows.n > 1 && rows.row_stride_bytes < row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("rows of ", row_bytes, " bytes overlap: the ",
                                                   "stride is ", rows.row_stride_bytes));
  }
  if (rows.dtype == DType::kFloat8E4M3) return ValidateScales(rows, target);
  return absl::OkStatus();
}

// Packs one panel. Returns the first element that cannot be held, or kNone.
int64_t PackPanel(const WeightRows& rows, DType dtype, const PackedLayout& layout, int64_t panel,
                  std::byte* target) {
  if (IsBlockQuantised(rows.dtype)) {
    PackBlockPanel(rows, layout, panel, target);
    return kNone;
  }
  if (rows.dtype == DType::kFloat8E4M3) return PackFloat8Panel(rows, layout, panel, target);
  return PackPlainPanel(rows, dtype, layout, panel, target);
}

// Why element `element` (row * k + column of W) cannot be held as `dtype`.
absl::Status ElementError(const WeightRows& rows, DType dtype, int64_t element) {
  const int64_t row = element / rows.k, column = element % rows.k;
  const std::string name = absl::StrCat("element [", row, ", ", column, "]");
  if (rows.dtype == DType::kFloat8E4M3) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is NaN"));
  }
  float value = 0;
  RETURN_IF_ERROR(DequantiseRow(
      rows.dtype, rows.data + row * rows.row_stride_bytes + column * BlockBytes(rows.dtype), 1,
      &value));
  return absl::OutOfRangeError(
      absl::StrCat(name, " = ", value, " is too large for ", DTypeName(dtype)));
}

}  // namespace

absl::StatusOr<int64_t> PackedWeightBytesCpu(const PackedWeight& weight) {
  ASSIGN_OR_RETURN(const PackedLayout layout, PackedLayout::Create(weight));
  return layout.num_panels * layout.panel_bytes;
}

absl::Status PackWeightCpu(const WeightRows& rows, const PackedWeight& target, Stream& stream) {
  RETURN_IF_ERROR(Validate(rows, target));
  CpuStream::From(stream).Enqueue([rows, target](CpuThreadPool& pool) {
    const PackedLayout layout = PackedLayout::Of(target);
    // The weight is ours to fill until this op has run.
    void* data = const_cast<void*>(target.data);
    std::atomic<int64_t> bad{kNone};
    pool.ParallelFor(layout.num_panels, [&](int64_t panel) {
      const int64_t element =
          PackPanel(rows, target.dtype, layout, panel, layout.Panel(data, panel));
      int64_t first = bad.load();
      while (element < first && !bad.compare_exchange_weak(first, element)) {
      }
    });
    return bad == kNone ? absl::OkStatus() : ElementError(rows, target.dtype, bad);
  });
  return absl::OkStatus();
}

}  // namespace heddle
