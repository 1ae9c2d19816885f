// Blocks of activation rows times panels of a weight: what `linear` and `grouped_linear` deal to
// threads. Private to the CPU's products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/packed_layout.h"
#include "kernels/gemm/packed_weight.h"
#include "kernels/gemm/panel_task.h"

namespace heddle {

inline constexpr int64_t kBlockRows = 96;      // their activations of a chunk of k fit the L2 cache
inline constexpr int64_t kTasksPerThread = 8;  // enough to even out threads of unequal speed
inline constexpr int64_t kSerialPacking = 16384;  // elements that are not worth a dispatch

// A task multiplies whole units, of a few panels each.
struct UnitRange {
  int64_t first_unit = 0;
  int64_t end_unit = 0;
};

// Products with weights that are packed alike. Every weight is read from memory once for a block of
// up to kBlockRows rows, by one thread; all else (packed activations, sums) is small beside it and
// stays in the caches. Immutable, so that threads may share it.
class PanelProduct {
 public:
  // `weight` gives type and shape, which must be valid.
  PanelProduct(const PackedWeight& weight, ActivationPrecision precision);

  int64_t num_units() const;
  // The most that a task may have with a block of `rows`.
  static int64_t MaxTaskUnits(int64_t rows);

  // Of packed activations.
  int64_t bytes_per_row() const { return bytes_per_row_; }
  RowTiles Tiles(int64_t rows) const { return {rows, max_tile_rows_}; }
  // Writes a tile of `rows` rows to its place in a block, first row of the tile * bytes_per_row()
  // in. row(r) points at the k elements of the r-th of them.
  void PackTile(int rows, absl::FunctionRef<const float*(int)> row, std::byte* tile) const;

  // Sets the columns of `units` in tiles.rows rows of `out`, from `first_row` on, to the packed
  // block times W^T plus the bias, which may be null. `weight` is packed as the constructor's.
  void Multiply(const PackedWeight& weight, const float* bias, const std::byte* block,
                RowTiles tiles, UnitRange units, MatrixView out, int64_t first_row) const;

 private:
  const PackedLayout layout_;
  const int64_t k_;
  const ActivationPrecision precision_;
  int max_tile_rows_;
  int64_t bytes_per_row_;
};

// A row of x; null where x has no columns, since its data may then be null.
inline const float* RowOrNull(const ConstMatrixView& x, int64_t row) {
  return x.cols > 0 ? x.Row<float>(row) : nullptr;
}

}  // namespace heddle
