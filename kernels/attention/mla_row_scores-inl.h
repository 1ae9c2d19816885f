// Scores of a block of keys for rows of queries that lie as keys do, for files that are compiled
// once per Highway target.
//
// Dimensions are in lanes, so that a key that was loaded serves every query of a tile and a query
// every key: few loads for each multiply-add, and no lane is idle, however few the rows. Each lane
// is one chain over ascending dimensions and the lanes are summed in one fixed order, whatever the
// shape of the tiles.
#if defined(HEDDLE_KERNELS_ATTENTION_MLA_ROW_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KERNELS_ATTENTION_MLA_ROW_SCORES_INL_H_
#undef HEDDLE_KERNELS_ATTENTION_MLA_ROW_SCORES_INL_H_
#else
#define HEDDLE_KERNELS_ATTENTION_MLA_ROW_SCORES_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/attention/mla_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {

// A tile: as many sums as stay in registers beside a key and the queries.
constexpr int kScoreKeys = kTileLanes == 16 ? 6 : 4;
constexpr int kScoreRows = kTileLanes == 16 ? 4 : 3;
// Tiles of rows whose queries stay in the first-level cache while the keys pass.
constexpr int kNearGroups = 2;

// Keys lie in two parts, a row of each for every key, both whole vectors long.
struct KeyRows {
  const float* const* part[2];
  int64_t dims[2];
};

#if HWY_TARGET == HWY_SCALAR
// The sums of the lanes of four vectors.
HWY_INLINE void SumsOfLanes(const TileVec (&v)[4], float* sums) {
  for (int i = 0; i < 4; ++i) sums[i] = hn::GetLane(v[i]);
}
#else
template <class D>
HWY_INLINE auto SumOfBlocks(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return SumOfBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The sums of the lanes of four vectors.
HWY_INLINE void SumsOfLanes(const TileVec (&v)[4], float* sums) {
  const TileTag d;
  const hn::RepartitionToWide<TileTag> wide;
  // In each block of four lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3.
  const auto pair = [=](TileVec a, TileVec b) HWY_ATTR {
    return hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  };
  const auto first = pair(v[0], v[1]), second = pair(v[2], v[3]);
  const TileVec low = hn::BitCast(d, hn::InterleaveLower(wide, first, second));
  const TileVec high = hn::BitCast(d, hn::InterleaveUpper(wide, first, second));
  hn::StoreU(SumOfBlocks(d, hn::Add(low, high)), hn::FixedTag<float, 4>(), sums);
}
#endif

// scores[t][r] = q[r] . keys[first_key + t] for kScoreKeys keys, or the last if there are fewer,
// and R rows.
template <int R>
HWY_INLINE void RowScoreTile(const float* HWY_RESTRICT q, int64_t q_stride, const KeyRows& keys,
                             int64_t first_key, int64_t last_key, float* HWY_RESTRICT scores) {
  const TileTag d;
  TileVec sums[kScoreKeys][4];
  HWY_UNROLL(16)
  for (int t = 0; t < kScoreKeys; ++t) {
    HWY_UNROLL(16)
    for (int r = 0; r < 4; ++r) sums[t][r] = hn::Zero(d);
  }
  for (int part = 0; part < 2; ++part) {
    const float* rows[kScoreKeys];
    HWY_UNROLL(16)
    for (int t = 0; t < kScoreKeys; ++t) {
      rows[t] = keys.part[part][std::min(first_key + t, last_key)];
    }
    const int64_t dims = keys.dims[part];
    for (int64_t dim = 0; dim < dims; dim += kTileLanes) {
      TileVec query[R];
      HWY_UNROLL(16)
      for (int r = 0; r < R; ++r) query[r] = hn::Load(d, q + r * q_stride + dim);
      HWY_UNROLL(16)
      for (int t = 0; t < kScoreKeys; ++t) {
        const TileVec key = hn::LoadU(d, rows[t] + dim);
        HWY_UNROLL(16)
        for (int r = 0; r < R; ++r) sums[t][r] = hn::MulAdd(query[r], key, sums[t][r]);
      }
    }
    q += dims;
  }
  HWY_UNROLL(16)
  for (int t = 0; t < kScoreKeys; ++t) {
    float sums_of_rows[4];
    SumsOfLanes(sums[t], sums_of_rows);
    std::memcpy(scores + t * kPanelRows, sums_of_rows, R * sizeof(float));
  }
}

template <int R = kScoreRows>
HWY_INLINE void RowScoreTileOf(int64_t rows, const float* q, int64_t q_stride, const KeyRows& keys,
                               int64_t first_key, int64_t last_key, float* scores) {
  if (rows == R) {
    RowScoreTile<R>(q, q_stride, keys, first_key, last_key, scores);
  } else if constexpr (R > 1) {
    RowScoreTileOf<R - 1>(rows, q, q_stride, keys, first_key, last_key, scores);
  }
}

// scores [num_keys, kPanelRows] = keys times queries [rows <= kPanelRows, q_stride], which lie as
// if the two parts were one. There is room for the scores of a block of kMlaBlock keys and a tile.
// Calls ask() before each tile.
template <class Ask>
HWY_NOINLINE void ScoreRows(const float* q, int64_t rows, int64_t q_stride, const KeyRows& keys,
                            int64_t num_keys, float* scores, const Ask& ask) {
  const int64_t num_groups = (rows + kScoreRows - 1) / kScoreRows;
  for (int64_t near = 0; near < num_groups; near += kNearGroups) {
    const int64_t end_near = std::min(near + kNearGroups, num_groups);
    for (int64_t key = 0; key < num_keys; key += kScoreKeys) {
      for (int64_t group = near; group < end_near; ++group) {
        const int64_t row = group * rows / num_groups, end = (group + 1) * rows / num_groups;
        ask();
        RowScoreTileOf<>(end - row, q + row * q_stride, q_stride, keys, key, num_keys - 1,
                         scores + key * kPanelRows + row);
      }
    }
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_ATTENTION_MLA_ROW_SCORES_INL_H_
