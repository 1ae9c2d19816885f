// What one thread multiplies at a time. Private to the CPU's product.
#pragma once

#include <cstdint>

#include "kernels/gemm/packed_layout.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// `rows` in as few tiles of at most `max_rows` as possible, sizes differing by at most one.
struct RowTiles {
  RowTiles(int64_t rows_in, int max_rows)
      : rows(rows_in), count((rows_in + max_rows - 1) / max_rows) {}

  int64_t First(int64_t tile) const { return tile * rows / count; }
  int Rows(int64_t tile) const { return static_cast<int>(First(tile + 1) - First(tile)); }

  int64_t rows;
  int64_t count;
};

// Panels [first_panel, end_panel) of a weight times all rows of a block of activations.
struct PanelTask {
  int64_t num_columns() const { return (end_panel - first_panel) * kPanelColumns; }

  const PackedWeight* weight;
  const PackedLayout* layout;
  int64_t first_panel;
  int64_t end_panel;
  RowTiles tiles;
  float* sums;  // [rows, num_columns()], aligned to 64 bytes; products are added to it
};

}  // namespace heddle
