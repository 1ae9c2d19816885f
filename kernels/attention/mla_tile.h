// Sizes of the working memory of MLA's attention on the CPU, in floats.
#pragma once

#include <cstdint>

#include "kernels/attention/mla_decode.h"

namespace heddle {

// For vectors of at most kMaxLanes. Every part is a multiple of a cache line.
struct MlaTile {
  static constexpr int64_t kMaxLanes = 16;
  static constexpr int64_t kMaxPanelRows = 2 * kMaxLanes;

  // Vectors of a row's figures may be read to the end of its panel.
  static constexpr int64_t PaddedRows(int64_t rows) {
    return (rows + kMaxPanelRows - 1) / kMaxPanelRows * kMaxPanelRows;
  }
  // Room for whole vectors.
  static constexpr int64_t WholeVectors(int64_t dims) {
    return (dims + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  }
  // Of a row of keys and values of a block: room for a vector that begins at the last element, and
  // an odd number of cache lines, so that the same part of all rows fits the first-level cache.
  static constexpr int64_t KeyStride(int64_t dims) {
    return ((dims + 2 * kMaxLanes - 1) / kMaxLanes | 1) * kMaxLanes;
  }
  static constexpr int64_t Queries(int64_t rows, int64_t key_dims) {
    return PaddedRows(rows) * key_dims;
  }
  // Of a block of keys, and of a tile that ends behind it.
  static constexpr int64_t Scores() { return (kMlaBlock + 8) * kMaxPanelRows; }
};

}  // namespace heddle
