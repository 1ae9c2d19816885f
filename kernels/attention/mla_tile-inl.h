// Blocks of keys and values against rows of queries under a running softmax, for files that are
// compiled once per Highway target.
//
// Rows are taken in panels of up to two vectors. Scores lie token by token with rows in lanes, so
// that a key is read as it is stored, element by element, and the softmax needs no sums across
// lanes; outputs lie row by row with dimensions in lanes. Each score is one chain of multiply-adds
// over ascending dimensions and each output one over ascending keys, whatever the shape of the
// tiles.
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
// Rows of an output tile of two vectors.
constexpr int kTileRows = kTileLanes == 16 ? 8 : 6;
// Floats of a panel of queries that stay in the first-level cache while the keys pass.
constexpr int64_t kNearQueries = 4096;
// A step of the dimensions, in which a line of each row of the next block is asked for.
constexpr int64_t kPrefetchDims = 16;

// A panel of queries is [key_dims, width] with a row in each column: two vectors, or for the last
// rows one, or half of one.
constexpr int64_t PanelWidth(int64_t rows) {
  if (rows > kTileLanes) return kPanelRows;
  return kTileLanes > 8 && rows <= kTileLanes / 2 ? kTileLanes / 2 : kTileLanes;
}

// Consecutive dimensions of the keys, and where the same ones of the next block's keys lie.
struct KeySegment {
  int64_t first_dim = 0;
  int64_t num_dims = 0;
  const std::byte* const* next = nullptr;  // a row for each of kMlaBlock keys; null: none
  int64_t bytes_per_dim = 0;
};

// scores[t] (+)= q . keys[t] for T keys and V vectors of rows; `resume` adds.
template <int T, int V, class D>
HWY_INLINE void ScoreTile(D d, const float* HWY_RESTRICT q, const float* HWY_RESTRICT keys,
                          int64_t key_stride, int64_t num_dims, bool resume,
                          const std::byte* const* next, int64_t bytes_per_dim,
                          float* HWY_RESTRICT scores) {
  constexpr int64_t kLanes = hn::MaxLanes(D());
  hn::Vec<D> sums[T][V];
  HWY_UNROLL(16)
  for (int t = 0; t < T; ++t) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) {
      sums[t][v] = resume ? hn::Load(d, scores + t * kPanelRows + v * kLanes) : hn::Zero(d);
    }
  }
  for (int64_t first = 0; first < num_dims; first += kPrefetchDims) {
    if (next != nullptr) {
      HWY_UNROLL(16)
      for (int t = 0; t < T; ++t) __builtin_prefetch(next[t] + first * bytes_per_dim, 0, 2);
    }
    const int64_t end = std::min(first + kPrefetchDims, num_dims);
    for (int64_t dim = first; dim < end; ++dim) {
      hn::Vec<D> query[V];
      HWY_UNROLL(16)
      for (int v = 0; v < V; ++v) query[v] = hn::Load(d, q + (dim * V + v) * kLanes);
      HWY_UNROLL(16)
      for (int t = 0; t < T; ++t) {
        const auto key = hn::Set(d, keys[t * key_stride + dim]);
        HWY_UNROLL(16)
        for (int v = 0; v < V; ++v) sums[t][v] = hn::MulAdd(query[v], key, sums[t][v]);
      }
    }
  }
  HWY_UNROLL(16)
  for (int t = 0; t < T; ++t) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) {
      hn::Store(sums[t][v], d, scores + t * kPanelRows + v * kLanes);
    }
  }
}

template <int T, int V, class D>
HWY_INLINE void ScoreTileOf(D d, int64_t num_keys, const float* q, const float* keys,
                            int64_t key_stride, int64_t num_dims, bool resume,
                            const std::byte* const* next, int64_t bytes_per_dim, float* scores) {
  if (num_keys == T) {
    ScoreTile<T, V>(d, q, keys, key_stride, num_dims, resume, next, bytes_per_dim, scores);
  } else if constexpr (T > 1) {
    ScoreTileOf<T - 1, V>(d, num_keys, q, keys, key_stride, num_dims, resume, next, bytes_per_dim,
                          scores);
  }
}

// scores [num_keys, kPanelRows] = keys [num_keys, ...] times a panel of queries of V vectors.
template <int V, class D>
HWY_NOINLINE void ScoreBlock(D d, const float* q, const float* keys, int64_t key_stride,
                             int64_t num_keys, const KeySegment* segments, int num_segments,
                             float* scores) {
  constexpr int64_t kWidth = V * hn::MaxLanes(D());
  constexpr int kMaxKeys = std::min(kTileSums / V, 12);
  constexpr int64_t kMaxDims = kNearQueries / kWidth;
  const int64_t num_tiles = (num_keys + kMaxKeys - 1) / kMaxKeys;
  for (int s = 0; s < num_segments; ++s) {
    const KeySegment& segment = segments[s];
    const int64_t parts = (segment.num_dims + kMaxDims - 1) / kMaxDims;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * segment.num_dims / parts;
      const int64_t num_dims = (part + 1) * segment.num_dims / parts - begin;
      const int64_t dim = segment.first_dim + begin;
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t key = tile * num_keys / num_tiles;
        const std::byte* next[kMaxKeys];
        if (segment.next != nullptr) {
          for (int64_t i = 0; i < kMaxKeys; ++i) {
            next[i] =
                segment.next[std::min(key + i, kMlaBlock - 1)] + begin * segment.bytes_per_dim;
          }
        }
        ScoreTileOf<kMaxKeys, V>(d, (tile + 1) * num_keys / num_tiles - key, q + dim * kWidth,
                                 keys + key * key_stride + dim, key_stride, num_dims, dim > 0,
                                 segment.next != nullptr ? next : nullptr, segment.bytes_per_dim,
                                 scores + key * kPanelRows);
      }
    }
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
// vectors of dimensions.
template <int R, int V>
HWY_INLINE void AccumulateTile(const float* HWY_RESTRICT weights, const float* HWY_RESTRICT values,
                               int64_t value_stride, int64_t begin, int64_t end,
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
    for (int v = 0; v < V; ++v) value[v] = hn::LoadU(d, values + t * value_stride + v * kTileLanes);
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
HWY_INLINE void AccumulateRows(int64_t rows, const float* weights, const float* values,
                               int64_t value_stride, int64_t begin, int64_t end,
                               const float* factor, float* out, int64_t out_stride) {
  if (rows == R) {
    AccumulateTile<R, V>(weights, values, value_stride, begin, end, factor, out, out_stride);
  } else if constexpr (R > 1) {
    AccumulateRows<V, R - 1>(rows, weights, values, value_stride, begin, end, factor, out,
                             out_stride);
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
template <int V>
HWY_INLINE void AccumulateDims(const float* weights, const float* values, int64_t value_stride,
                               const OutputTile* tiles, int64_t num_tiles, const PanelStats& stats,
                               float* out, int64_t out_stride) {
  static constexpr float kKeep = 1.0f;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const OutputTile& tile = tiles[i];
    if (tile.common > 0) {
      AccumulateRows<V>(tile.rows, weights + tile.first, values, value_stride, 0, tile.common,
                        stats.factor + tile.first, out + tile.first * out_stride, out_stride);
    }
    if (!tile.ragged) continue;
    for (int64_t row = tile.first; row < tile.first + tile.rows; ++row) {
      const auto count = static_cast<int64_t>(stats.count[row]);
      if (count == tile.common) continue;
      AccumulateTile<1, V>(weights + row, values, value_stride, tile.common, count,
                           tile.common > 0 ? &kKeep : stats.factor + row, out + row * out_stride,
                           out_stride);
    }
  }
}

// Adds a block's values, weighted, to the outputs [rows, dims] of a panel.
HWY_NOINLINE void AccumulateBlock(const float* weights, const float* values, int64_t value_stride,
                                  int64_t num_dims, int64_t rows, const PanelStats& stats,
                                  float* out, int64_t out_stride) {
  OutputTile tiles[kPanelRows];
  const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = i * rows / num_tiles, end = (i + 1) * rows / num_tiles;
    const auto [least, most] = std::minmax_element(stats.count + first, stats.count + end);
    tiles[i] = {first, end - first, static_cast<int64_t>(*least), *least != *most};
  }
  int64_t dim = 0;
  for (; dim + kTileLanes < num_dims; dim += 2 * kTileLanes) {
    AccumulateDims<2>(weights, values + dim, value_stride, tiles, num_tiles, stats, out + dim,
                      out_stride);
  }
  if (dim < num_dims) {
    AccumulateDims<1>(weights, values + dim, value_stride, tiles, num_tiles, stats, out + dim,
                      out_stride);
  }
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
  int64_t key_dims;
  int64_t value_dims;
  int64_t out_stride;
  const float* q;  // panels [key_dims, PanelWidth]
  float* scores;   // [kMlaBlock, kPanelRows]
  float* count;    // [padded rows], and so are the following
  float* maximum;
  float* sum;
  float* factor;
  float* out;  // [rows, out_stride]
};

// Makes panels of rows; lanes without a row are multiplied too.
inline void ClearPanels(int64_t rows, int64_t key_dims, float* packed) {
  const int64_t last = (rows - 1) / kPanelRows * kPanelRows, width = PanelWidth(rows - last);
  if (rows - last < width) std::fill_n(packed + last * key_dims, width * key_dims, 0.0f);
}

// Writes row `row` of `rows` in all into the panels at `packed`, `num_dims` of its key_dims
// elements from `first_dim` on.
inline void PackRow(const float* values, int64_t num_dims, int64_t first_dim, int64_t row,
                    int64_t rows, int64_t key_dims, float* packed) {
  const int64_t first = row / kPanelRows * kPanelRows, width = PanelWidth(rows - first);
  float* target = packed + first * key_dims + first_dim * width + row - first;
  for (int64_t i = 0; i < num_dims; ++i) target[i * width] = values[i];
}

// Scores and their softmax for a panel whose queries lie in V vectors.
template <int V, class D>
HWY_INLINE void WeighBlock(D d, const float* q, const float* keys, int64_t stride, int64_t num_keys,
                           const KeySegment* segments, int num_segments, float scale,
                           const PanelStats& stats, float* scores) {
  ScoreBlock<V>(d, q, keys, stride, num_keys, segments, num_segments, scores);
  SoftmaxBlock<V>(d, num_keys, scale, stats, scores);
}

// Folds a block of keys and values, `stride` apart, into the rows' running softmax. Row r sees the
// first rows.count[r] of them. The next block is asked for as the segments say.
HWY_NOINLINE void FoldBlock(const TileRows& rows, const float* keys, const float* values,
                            int64_t stride, const KeySegment* segments, int num_segments,
                            float scale) {
  for (int64_t panel = 0; panel < rows.num_panels(); ++panel) {
    const int64_t size = rows.PanelSize(panel);
    const PanelStats stats = rows.Stats(panel);
    const auto visible = static_cast<int64_t>(*std::max_element(stats.count, stats.count + size));
    if (visible == 0) continue;
    KeySegment todo[2];
    for (int s = 0; s < num_segments; ++s) {
      todo[s] = segments[s];
      if (panel > 0) todo[s].next = nullptr;  // Once is enough.
    }
    const float* q = rows.q + panel * kPanelRows * rows.key_dims;
    const int64_t width = PanelWidth(size);
    if (width == kPanelRows) {
      WeighBlock<2>(TileTag(), q, keys, stride, visible, todo, num_segments, scale, stats,
                    rows.scores);
    } else if (width == kTileLanes) {
      WeighBlock<1>(TileTag(), q, keys, stride, visible, todo, num_segments, scale, stats,
                    rows.scores);
    } else {
      WeighBlock<1>(hn::CappedTag<float, 8>(), q, keys, stride, visible, todo, num_segments, scale,
                    stats, rows.scores);
    }
    AccumulateBlock(rows.scores, values, stride, rows.value_dims, size, stats,
                    rows.out + panel * kPanelRows * rows.out_stride, rows.out_stride);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_ATTENTION_MLA_TILE_INL_H_
