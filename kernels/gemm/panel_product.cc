#include "kernels/gemm/panel_product.h"

#include <algorithm>
#include <cstring>

#include "kernels/gemm/float_kernel.h"
#include "kernels/gemm/int8_kernel.h"

namespace heddle {
namespace {

constexpr int64_t kUnitPanels = 4;
constexpr int64_t kMaxSums = 32 * 1024;  // floats of a task's sums: 128 KiB of stack

using RowOf = absl::FunctionRef<const float*(int)>;

// Rows as FloatKernel reads them.
void PackFloats(const PackedLayout& layout, int64_t k_count, int rows, RowOf row, float* tile) {
  if (layout.padded_k == 0) return;  // there is no tile
  for (int r = 0; r < rows; ++r) {
    const float* x = row(r);
    float* target = tile + r * kPlainStep;
    for (int64_t k = -layout.lead; k + layout.lead < layout.padded_k; k += kPlainStep) {
      if (k >= 0 && k + kPlainStep <= k_count) {
        std::memcpy(target, x + k, kPlainStep * sizeof(float));
      } else {
        for (int i = 0; i < kPlainStep; ++i) {
          target[i] = k + i >= 0 && k + i < k_count ? x[k + i] : 0.0f;
        }
      }
      target += rows * kPlainStep;
    }
  }
}

// The same as Int8Kernel reads them.
void QuantiseRows(const PackedLayout& layout, int64_t k_count, int rows, RowOf row,
                  ActivationGroup* tile) {
  const Int8Kernel& kernel = GetInt8Kernel();
  for (int r = 0; r < rows; ++r) {
    const float* x = row(r);
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      const int64_t k = g * kGroupElements - layout.lead;
      const int64_t begin = std::max<int64_t>(k, 0);
      const int64_t end = std::min(k + kGroupElements, k_count);
      kernel.quantise(x + begin, static_cast<int>(begin - k), static_cast<int>(end - begin),
                      tile[g * rows + r]);
    }
  }
}

// Sums begin with the bias. `width` columns of the task exist.
void StartSums(const PanelTask& task, const float* bias, int64_t width) {
  const int64_t columns = task.num_columns();
  std::fill_n(task.sums, columns * task.tiles.rows, 0.0f);
  if (bias == nullptr) return;
  for (int64_t r = 0; r < task.tiles.rows; ++r) {
    std::copy_n(bias + task.first_panel * kPanelColumns, width, task.sums + r * columns);
  }
}

}  // namespace

PanelProduct::PanelProduct(const PackedWeight& weight, ActivationPrecision precision)
    : layout_(PackedLayout::Of(weight)), k_(weight.k), precision_(precision) {
  if (precision == ActivationPrecision::kInt8) {
    max_tile_rows_ = GetInt8Kernel().max_tile_rows;
    bytes_per_row_ = layout_.num_groups * static_cast<int64_t>(sizeof(ActivationGroup));
  } else {
    max_tile_rows_ = GetFloatKernel().max_tile_rows;
    bytes_per_row_ = layout_.padded_k * static_cast<int64_t>(sizeof(float));
  }
}

int64_t PanelProduct::num_units() const {
  return (layout_.num_panels + kUnitPanels - 1) / kUnitPanels;
}

int64_t PanelProduct::MaxTaskUnits(int64_t rows) {
  return kMaxSums / (kUnitPanels * kPanelColumns * rows);
}

void PanelProduct::PackTile(int rows, RowOf row, std::byte* tile) const {
  if (precision_ == ActivationPrecision::kInt8) {
    QuantiseRows(layout_, k_, rows, row, reinterpret_cast<ActivationGroup*>(tile));
  } else {
    PackFloats(layout_, k_, rows, row, reinterpret_cast<float*>(tile));
  }
}

void PanelProduct::Multiply(const PackedWeight& weight, const float* bias, const std::byte* block,
                            RowTiles tiles, UnitRange units, MatrixView out,
                            int64_t first_row) const {
  alignas(64) float sums[kMaxSums];
  const int64_t first_panel = units.first_unit * kUnitPanels;
  const int64_t end_panel = std::min(units.end_unit * kUnitPanels, layout_.num_panels);
  const PanelTask task = {&weight, &layout_, first_panel, end_panel, tiles, sums};
  const int64_t columns = task.num_columns();
  const int64_t first_column = first_panel * kPanelColumns;
  const int64_t width = std::min(columns, out.cols - first_column);
  StartSums(task, bias, width);
  if (precision_ == ActivationPrecision::kInt8) {
    GetInt8Kernel().multiply(task, reinterpret_cast<const ActivationGroup*>(block));
  } else {
    GetFloatKernel().multiply(task, reinterpret_cast<const float*>(block));
  }
  for (int64_t r = 0; r < tiles.rows; ++r) {
    std::copy_n(sums + r * columns, width, out.Row<float>(first_row + r) + first_column);
  }
}

}  // namespace heddle
