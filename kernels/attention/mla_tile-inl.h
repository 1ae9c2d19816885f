// Blocks of keys and values against rows of queries under a running softmax, for files that are
// compiled once per Highway target.
//
// Rows are taken in panels of two vectors. Scores lie token by token with rows in lanes, so that a
// key is read as it is stored, element by element, and the softmax needs no sums across lanes;
// outputs lie row by row with dimensions in lanes. Each score is one chain of multiply-adds over
// ascending dimensions and each output one over ascending keys, whatever the shape of the tiles.
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
namespace hn = hwy::HWY_NAMESPACE;

using TileTag = hn::CappedTag<float, MlaTile::kMaxLanes>;
using TileVec = hn::Vec<TileTag>;
constexpr int64_t kTileLanes = hn::MaxLanes(TileTag());
constexpr int64_t kPanelRows = 2 * kTileLanes;
static_assert(MlaTile::kMaxPanelRows % kPanelRows == 0);

// Sums of a tile that live in registers: enough chains to hide the latency of a multiply-add.
constexpr int kTileSums = 12;
constexpr int kTileRows = 6;
// Dimensions of a panel of queries that stay in the first-level cache while the keys pass.
constexpr int64_t kScoreDims = 256;
// A step of the dimensions, in which a line of each row of the next block is asked for.
constexpr int64_t kPrefetchDims = 16;

// Consecutive dimensions of the keys, and where the same ones of the next block's keys lie.
struct KeySegment {
  int64_t first_dim = 0;
  int64_t num_dims = 0;
  const std::byte* const* next = nullptr;  // a row for each of kMlaBlock keys; null: none
  int64_t bytes_per_dim = 0;
};

// scores[t] (+)= q . keys[t] for T keys and V vectors of rows; `resume` adds.
template <int T, int V>
HWY_INLINE void ScoreTile(const float* HWY_RESTRICT q, const float* HWY_RESTRICT keys,
                          int64_t key_stride, int64_t num_dims, bool resume,
                          const std::byte* const* next, int64_t bytes_per_dim,
                          float* HWY_RESTRICT scores) {
  const TileTag d;
  TileVec sums[T][V];
  HWY_UNROLL(16)
  for (int t = 0; t < T; ++t) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) {
      sums[t][v] = resume ? hn::Load(d, scores + t * kPanelRows + v * kTileLanes) : hn::Zero(d);
    }
  }
  for (int64_t first = 0; first < num_dims; first += kPrefetchDims) {
    if (next != nullptr) {
      HWY_UNROLL(16)
      for (int t = 0; t < T; ++t) __builtin_prefetch(next[t] + first * bytes_per_dim, 0, 2);
    }
    const int64_t end = std::min(first + kPrefetchDims, num_dims);
    for (int64_t dim = first; dim < end; ++dim) {
      TileVec query[V];
      HWY_UNROLL(16)
      for (int v = 0; v < V; ++v) query[v] = hn::Load(d, q + (dim * V + v) * kTileLanes);
      HWY_UNROLL(16)
      for (int t = 0; t < T; ++t) {
        const TileVec key = hn::Set(d, keys[t * key_stride + dim]);
        HWY_UNROLL(16)
        for (int v = 0; v < V; ++v) sums[t][v] = hn::MulAdd(query[v], key, sums[t][v]);
      }
    }
  }
  HWY_UNROLL(16)
  for (int t = 0; t < T; ++t) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) {
      hn::Store(sums[t][v], d, scores + t * kPanelRows + v * kTileLanes);
    }
  }
}

template <int V, int T = kTileSums / V>
HWY_INLINE void ScoreTileOf(int64_t num_keys, const float* q, const float* keys, int64_t key_stride,
                            int64_t num_dims, bool resume, const std::byte* const* next,
                            int64_t bytes_per_dim, float* scores) {
  if (num_keys == T) {
    ScoreTile<T, V>(q, keys, key_stride, num_dims, resume, next, bytes_per_dim, scores);
  } else if constexpr (T > 1) {
    ScoreTileOf<V, T - 1>(num_keys, q, keys, key_stride, num_dims, resume, next, bytes_per_dim,
                          scores);
  }
}

// scores [num_keys, kPanelRows] = keys [num_keys, ...] times a panel of queries [dims, V vectors].
template <int V>
void ScoreBlock(const float* q, const float* keys, int64_t key_stride, int64_t num_keys,
                const KeySegment* segments, int num_segments, float* scores) {
  constexpr int64_t kMaxKeys = kTileSums / V;
  const int64_t num_tiles = (num_keys + kMaxKeys - 1) / kMaxKeys;
  for (int s = 0; s < num_segments; ++s) {
    const KeySegment& segment = segments[s];
    const int64_t parts = (segment.num_dims + kScoreDims - 1) / kScoreDims;
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
        ScoreTileOf<V>((tile + 1) * num_keys / num_tiles - key, q + dim * V * kTileLanes,
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
template <int V>
HWY_INLINE void SoftmaxBlock(int64_t num_keys, float scale, const PanelStats& stats,
                             float* HWY_RESTRICT scores) {
  const TileTag d;
  const auto scales = hn::Set(d, scale);
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int v = 0; v < V; ++v) {
    float* column = scores + v * kTileLanes;
    const int64_t row = v * kTileLanes;
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

// Adds a block's values, weighted, to the outputs [rows, dims] of a panel. Neighbouring rows take
// the keys that all of them see together, then each the rest of its own.
template <int V>
HWY_INLINE void AccumulateDims(const float* weights, const float* values, int64_t value_stride,
                               int64_t rows, const PanelStats& stats, float* out,
                               int64_t out_stride) {
  static constexpr float kKeep = 1.0f;
  const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = tile * rows / num_tiles, end = (tile + 1) * rows / num_tiles;
    const auto [least, most] = std::minmax_element(stats.count + first, stats.count + end);
    const auto common = static_cast<int64_t>(*least);
    if (common > 0) {
      AccumulateRows<V>(end - first, weights + first, values, value_stride, 0, common,
                        stats.factor + first, out + first * out_stride, out_stride);
    }
    if (*least == *most) continue;
    for (int64_t row = first; row < end; ++row) {
      const auto count = static_cast<int64_t>(stats.count[row]);
      if (count == common) continue;
      AccumulateTile<1, V>(weights + row, values, value_stride, common, count,
                           common > 0 ? &kKeep : stats.factor + row, out + row * out_stride,
                           out_stride);
    }
  }
}

inline void AccumulateBlock(const float* weights, const float* values, int64_t value_stride,
                            int64_t num_dims, int64_t rows, const PanelStats& stats, float* out,
                            int64_t out_stride) {
  int64_t dim = 0;
  for (; dim + kTileLanes < num_dims; dim += 2 * kTileLanes) {
    AccumulateDims<2>(weights, values + dim, value_stride, rows, stats, out + dim, out_stride);
  }
  if (dim < num_dims) {
    AccumulateDims<1>(weights, values + dim, value_stride, rows, stats, out + dim, out_stride);
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
  const float* q;  // panels [key_dims, 1 or 2 vectors], see PackRows
  float* scores;   // [kMlaBlock, kPanelRows]
  float* count;    // [padded rows], and so are the following
  float* maximum;
  float* sum;
  float* factor;
  float* out;  // [rows, out_stride]
};

// Writes row `row` of `rows` in all into the panels at `packed`, `num_dims` of its key_dims
// elements from `first_dim` on.
inline void PackRow(const float* values, int64_t num_dims, int64_t first_dim, int64_t row,
                    int64_t rows, int64_t key_dims, float* packed) {
  const int64_t panel = row / kPanelRows, lane = row % kPanelRows;
  const int64_t width = rows - panel * kPanelRows > kTileLanes ? kPanelRows : kTileLanes;
  float* target = packed + panel * kPanelRows * key_dims + first_dim * width + lane;
  for (int64_t i = 0; i < num_dims; ++i) target[i * width] = values[i];
}

// Folds a block of keys [num_keys, key_stride] and values into the rows' running softmax. Row r
// sees the first rows.count[r] keys. The next block is asked for as the segments say.
inline void FoldBlock(const TileRows& rows, const float* keys, const float* values, int64_t stride,
                      int64_t num_keys, const KeySegment* segments, int num_segments, float scale) {
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
    if (size > kTileLanes) {
      ScoreBlock<2>(q, keys, stride, visible, todo, num_segments, rows.scores);
      SoftmaxBlock<2>(visible, scale, stats, rows.scores);
    } else {
      ScoreBlock<1>(q, keys, stride, visible, todo, num_segments, rows.scores);
      SoftmaxBlock<1>(visible, scale, stats, rows.scores);
    }
    AccumulateBlock(rows.scores, values, stride, rows.value_dims, size, stats,
                    rows.out + panel * kPanelRows * rows.out_stride, rows.out_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_ATTENTION_MLA_TILE_INL_H_
