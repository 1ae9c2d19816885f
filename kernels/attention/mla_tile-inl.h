// Blocks of values against rows of queries under a running softmax, for files that are compiled
// once per Highway target.
//
// Rows are taken in panels of up to two vectors. Scores lie token by token with rows in lanes, so
// that the softmax needs no sums across lanes; outputs lie row by row with dimensions in lanes.
// Each output is one chain of multiply-adds over ascending keys, whatever the shape of the tiles.
#if defined(HEDDLE_KERNELS_ATTENTION_MLA_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KERNELS_ATTENTION_MLA_TILE_INL_H_
#undef HEDDLE_KERNELS_ATTENTION_MLA_TILE_INL_H_
#else
#define HEDDLE_KERNELS_ATTENTION_MLA_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/attention/mla_tile.h"
#include "kernels/cpu/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using TileTag = hn::CappedTag<float, MlaTile::kMaxLanes>;
using TileVec = hn::Vec<TileTag>;
constexpr int64_t kTileLanes = hn::MaxLanes(TileTag());
constexpr int64_t kPanelRows = 2 * kTileLanes;
static_assert(MlaTile::kMaxPanelRows % kPanelRows == 0);

// Sums of a tile that live in registers, next to a vector or two of queries or values: enough
// chains to hide the latency of a multiply-add, and few loads for each.
constexpr int kTileSums = kTileLanes == 16 ? 24 : 12;
// Rows and vectors of an output tile.
constexpr int kTileRows = 6;
constexpr int kTileVectors = kTileSums / kTileRows;

// Lanes of a panel of up to kPanelRows rows: two vectors, or for the last rows one, or half of one.
constexpr int64_t PanelWidth(int64_t rows) {
  if (rows > kTileLanes) return kPanelRows;
  return kTileLanes > 8 && rows <= kTileLanes / 2 ? kTileLanes / 2 : kTileLanes;
}

// Calls f<V>(d) with the vectors that make up a panel of `rows` rows.
template <class F>
HWY_INLINE void WithPanelVectors(int64_t rows, const F& f) {
  const int64_t width = PanelWidth(rows);
  if (width == kPanelRows) {
    f.template operator()<2>(TileTag());
  } else if (width == kTileLanes) {
    f.template operator()<1>(TileTag());
  } else {
    f.template operator()<1>(hn::CappedTag<float, 8>());
  }
}

// The running softmax of a panel's rows, kPanelRows of each. A row sees the first `count` keys of
// a block; `factor` is what its output so far has to be multiplied by.
struct PanelStats {
  float* count;
  float* maximum;
  float* sum;
  float* factor;
};

// Turns scores into weights exp(score * scale - maximum), those of keys that a row does not see
// into 0 whatever they were.
template <int V, class D>
HWY_NOINLINE void SoftmaxBlock(D d, int64_t num_keys, float scale, const PanelStats& stats,
                               float* HWY_RESTRICT scores) {
  constexpr int64_t kLanes = hn::MaxLanes(D());
  const auto scales = hn::Set(d, scale);
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int v = 0; v < V; ++v) {
    float* column = scores + v * kLanes;
    const int64_t row = v * kLanes;
    const auto counts = hn::Load(d, stats.count + row);
    const auto old_maximum = hn::Load(d, stats.maximum + row);
    auto maximum = old_maximum;
    for (int64_t t = 0; t < num_keys; ++t) {
      const auto seen = hn::Gt(counts, hn::Set(d, static_cast<float>(t)));
      const auto score = hn::Mul(hn::Load(d, column + t * kPanelRows), scales);
      maximum = hn::Max(hn::IfThenElse(seen, score, lowest), maximum);
    }
    auto sum = hn::Zero(d);
    for (int64_t t = 0; t < num_keys; ++t) {
      const auto seen = hn::Gt(counts, hn::Set(d, static_cast<float>(t)));
      const auto score = hn::Load(d, column + t * kPanelRows);
      const auto weight =
          hn::IfThenElseZero(seen, ExpUpTo88(d, hn::MulSub(score, scales, maximum)));
      hn::Store(weight, d, column + t * kPanelRows);
      sum = hn::Add(sum, weight);
    }
    // Rows that see nothing here stay as they are, even those that have seen nothing before.
    const auto sees_some = hn::Gt(counts, hn::Zero(d));
    const auto factor =
        hn::IfThenElse(sees_some, ExpUpTo88(d, hn::Sub(old_maximum, maximum)), hn::Set(d, 1.0f));
    hn::Store(maximum, d, stats.maximum + row);
    hn::Store(factor, d, stats.factor + row);
    hn::Store(hn::MulAdd(hn::Load(d, stats.sum + row), factor, sum), d, stats.sum + row);
  }
}

// out[r] = out[r] * factor[r] + the sum of weights[t][r] * values[t] over keys [begin, end), for V
// vectors of dimensions from `dim` on.
template <int R, int V>
HWY_INLINE void AccumulateTile(const float* HWY_RESTRICT weights, const float* const* values,
                               int64_t dim, int64_t begin, int64_t end,
                               const float* HWY_RESTRICT factor, float* HWY_RESTRICT out,
                               int64_t out_stride) {
  const TileTag d;
  TileVec sums[R][V];
  HWY_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    const TileVec factors = hn::Set(d, factor[r]);
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) {
      sums[r][v] = hn::Mul(hn::Load(d, out + r * out_stride + v * kTileLanes), factors);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    TileVec value[V];
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) value[v] = hn::LoadU(d, values[t] + dim + v * kTileLanes);
    HWY_UNROLL(16)
    for (int r = 0; r < R; ++r) {
      const TileVec weight = hn::Set(d, weights[t * kPanelRows + r]);
      HWY_UNROLL(16)
      for (int v = 0; v < V; ++v) sums[r][v] = hn::MulAdd(weight, value[v], sums[r][v]);
    }
  }
  HWY_UNROLL(16)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) {
      hn::Store(sums[r][v], d, out + r * out_stride + v * kTileLanes);
    }
  }
}

template <int V, int R = kTileRows>
HWY_INLINE void AccumulateRows(int64_t rows, const float* weights, const float* const* values,
                               int64_t dim, int64_t begin, int64_t end, const float* factor,
                               float* out, int64_t out_stride) {
  if (rows == R) {
    AccumulateTile<R, V>(weights, values, dim, begin, end, factor, out, out_stride);
  } else if constexpr (R > 1) {
    AccumulateRows<V, R - 1>(rows, weights, values, dim, begin, end, factor, out, out_stride);
  }
}

// Neighbouring rows of a panel, which take the keys that all of them see together, then each the
// rest of its own.
struct OutputTile {
  int64_t first;
  int64_t rows;
  int64_t common;  // keys
  bool ragged;
};

// Adds a block's values, weighted, to V vectors of the outputs of a panel's rows.
template <int V, class Ask>
HWY_INLINE void AccumulateDims(const float* weights, const float* const* values, int64_t dim,
                               const OutputTile* tiles, int64_t num_tiles, const PanelStats& stats,
                               float* out, int64_t out_stride, const Ask& ask) {
  static constexpr float kKeep = 1.0f;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const OutputTile& tile = tiles[i];
    ask();
    if (tile.common > 0) {
      AccumulateRows<V>(tile.rows, weights + tile.first, values, dim, 0, tile.common,
                        stats.factor + tile.first, out + tile.first * out_stride, out_stride);
    }
    if (!tile.ragged) continue;
    for (int64_t row = tile.first; row < tile.first + tile.rows; ++row) {
      const auto count = static_cast<int64_t>(stats.count[row]);
      if (count == tile.common) continue;
      AccumulateTile<1, V>(weights + row, values, dim, tile.common, count,
                           tile.common > 0 ? &kKeep : stats.factor + row, out + row * out_stride,
                           out_stride);
    }
  }
}

// Adds a block's values, weighted, to the outputs [rows, dims] of a panel; calls ask() before each
// tile.
template <class Ask>
HWY_NOINLINE void AccumulateBlock(const float* weights, const float* const* values,
                                  int64_t num_dims, int64_t rows, const PanelStats& stats,
                                  float* out, int64_t out_stride, const Ask& ask) {
  OutputTile tiles[kPanelRows];
  const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = i * rows / num_tiles, end = (i + 1) * rows / num_tiles;
    const auto [least, most] = std::minmax_element(stats.count + first, stats.count + end);
    tiles[i] = {first, end - first, static_cast<int64_t>(*least), *least != *most};
  }
  int64_t dim = 0;
  const auto accumulate = [&]<int V>() {
    for (; dim + (V - 1) * kTileLanes < num_dims; dim += V * kTileLanes) {
      AccumulateDims<V>(weights, values, dim, tiles, num_tiles, stats, out + dim, out_stride, ask);
    }
  };
  if constexpr (kTileVectors > 2) accumulate.template operator()<kTileVectors>();
  accumulate.template operator()<2>();
  accumulate.template operator()<1>();
}

// Rows of queries and their running softmax, in panels.
struct TileRows {
  int64_t num_panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
  int64_t PanelSize(int64_t panel) const { return std::min(rows - panel * kPanelRows, kPanelRows); }
  PanelStats Stats(int64_t panel) const {
    const int64_t first = panel * kPanelRows;
    return {count + first, maximum + first, sum + first, factor + first};
  }

  // Begins with having seen nothing.
  void Clear() const {
    std::fill_n(maximum, MlaTile::PaddedRows(rows), -std::numeric_limits<float>::infinity());
    std::fill_n(sum, MlaTile::PaddedRows(rows), 0.0f);
    std::fill_n(out, rows * out_stride, 0.0f);
  }

  int64_t rows;
  int64_t value_dims;
  int64_t out_stride;
  float* scores;  // [kMlaBlock, kPanelRows]
  float* count;   // [padded rows], and so are the following
  float* maximum;
  float* sum;
  float* factor;
  float* out;  // [rows, out_stride]
};

// Folds a block of values, as AccumulateBlock reads them, into the rows' running softmax. Row r
// sees the first rows.count[r] of them. `score(panel, num_keys)` writes the scores [num_keys,
// kPanelRows] of a panel to rows.scores.
template <class Score, class Ask>
HWY_INLINE void FoldBlock(const TileRows& rows, const float* const* values, float scale,
                          const Score& score, const Ask& ask) {
  for (int64_t panel = 0; panel < rows.num_panels(); ++panel) {
    const int64_t size = rows.PanelSize(panel);
    const PanelStats stats = rows.Stats(panel);
    const auto visible = static_cast<int64_t>(*std::max_element(stats.count, stats.count + size));
    if (visible == 0) continue;
    score(panel, visible);
    WithPanelVectors(size, [&]<int V>(auto d) HWY_ATTR {
      SoftmaxBlock<V>(d, visible, scale, stats, rows.scores);
    });
    AccumulateBlock(rows.scores, values, rows.value_dims, size, stats,
                    rows.out + panel * kPanelRows * rows.out_stride, rows.out_stride, ask);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_ATTENTION_MLA_TILE_INL_H_
