// Scores of a block of keys for panels of queries, for files that are compiled once per Highway
// target.
//
// Rows are in lanes, so that a key is read element by element as it lies and nothing is summed
// across lanes: best for rows that fill vectors and keys that are short. Each score is one chain of
// multiply-adds over ascending dimensions, whatever the shape of the tiles.
#if defined(HEDDLE_KERNELS_ATTENTION_MLA_PANEL_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KERNELS_ATTENTION_MLA_PANEL_SCORES_INL_H_
#undef HEDDLE_KERNELS_ATTENTION_MLA_PANEL_SCORES_INL_H_
#else
#define HEDDLE_KERNELS_ATTENTION_MLA_PANEL_SCORES_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/attention/mla_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {

// Floats of a panel of queries that stay in the first-level cache while the keys pass.
constexpr int64_t kNearQueries = 4096;

// Makes panels of rows: [key_dims, PanelWidth] with a row in each column; lanes without a row are
// multiplied too.
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

// scores[t] (+)= q . keys[t] for T keys and V vectors of rows; `resume` adds.
template <int T, int V, class D>
HWY_INLINE void PanelScoreTile(D d, const float* HWY_RESTRICT q, const float* HWY_RESTRICT keys,
                               int64_t key_stride, int64_t num_dims, bool resume,
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
  for (int64_t dim = 0; dim < num_dims; ++dim) {
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
  HWY_UNROLL(16)
  for (int t = 0; t < T; ++t) {
    HWY_UNROLL(16)
    for (int v = 0; v < V; ++v) {
      hn::Store(sums[t][v], d, scores + t * kPanelRows + v * kLanes);
    }
  }
}

template <int T, int V, class D>
HWY_INLINE void PanelScoreTileOf(D d, int64_t num_keys, const float* q, const float* keys,
                                 int64_t key_stride, int64_t num_dims, bool resume, float* scores) {
  if (num_keys == T) {
    PanelScoreTile<T, V>(d, q, keys, key_stride, num_dims, resume, scores);
  } else if constexpr (T > 1) {
    PanelScoreTileOf<T - 1, V>(d, num_keys, q, keys, key_stride, num_dims, resume, scores);
  }
}

// scores [num_keys, kPanelRows] = keys [num_keys, num_dims] times a panel of queries of V vectors.
template <int V, class D>
HWY_NOINLINE void ScorePanel(D d, const float* q, const float* keys, int64_t key_stride,
                             int64_t num_dims, int64_t num_keys, float* scores) {
  constexpr int64_t kWidth = V * hn::MaxLanes(D());
  constexpr int kMaxKeys = std::min(kTileSums / V, 12);
  constexpr int64_t kMaxDims = kNearQueries / kWidth;
  const int64_t num_tiles = (num_keys + kMaxKeys - 1) / kMaxKeys;
  const int64_t parts = (num_dims + kMaxDims - 1) / kMaxDims;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t dim = part * num_dims / parts, end = (part + 1) * num_dims / parts;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t key = tile * num_keys / num_tiles;
      PanelScoreTileOf<kMaxKeys, V>(d, (tile + 1) * num_keys / num_tiles - key, q + dim * kWidth,
                                    keys + key * key_stride + dim, key_stride, end - dim, dim > 0,
                                    scores + key * kPanelRows);
    }
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_ATTENTION_MLA_PANEL_SCORES_INL_H_
