#include "kernels/gemm/int8_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/int8_kernel.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/gemm/block_panel-inl.h"
#include "kernels/gemm/int8_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {

// Rows and panels of a micro-tile; fewer rows take more panels, for several streams from memory.
constexpr int kMaxTileRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 1;
constexpr int PanelsOfTile(int rows) { return kLanes < 8 || rows > 2 ? 1 : rows == 2 ? 2 : 4; }

// Groups of a chunk, whose weights stay in the first-level cache while all rows meet them.
constexpr int64_t kChunkGroups = 32;
// How far ahead of its use a stream of quants is asked for.
constexpr ptrdiff_t kPrefetchBytes = 2048;

void Quantise(const float* x, int first, int count, ActivationGroup& group) {
  const FloatTag d;
  const hn::Rebind<int8_t, FloatTag> d8;
  alignas(64) float values[kGroupElements] = {};
  std::memcpy(values + first, x, count * sizeof(float));
  FloatVector largest = hn::Zero(d);
  FloatVector poison = hn::Zero(d);  // becomes NaN where a value is not finite
  for (int i = 0; i < kGroupElements; i += kLanes) {
    const FloatVector value = hn::Load(d, values + i);
    largest = hn::Max(largest, hn::Abs(value));
    poison = hn::Add(poison, hn::Mul(value, hn::Zero(d)));
  }
  const float magnitude = hn::GetLane(hn::MaxOfLanes(d, largest));
  const float inverse = 127.0f / magnitude;
  std::memset(&group, 0, sizeof(group));
  if (hn::GetLane(hn::SumOfLanes(d, poison)) != 0.0f) {
    group.scale = group.scaled_sum = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  if (!std::isfinite(inverse)) return;  // zeros, or below 4e-37
  group.scale = magnitude / 127.0f;
  for (int i = 0; i < kGroupElements; i += kLanes) {
    const FloatVector scaled = hn::Mul(hn::Load(d, values + i), hn::Set(d, inverse));
    const Int32Vector quants = hn::NearestInt(scaled);
    hn::Store(hn::DemoteTo(d8, quants), d8, group.quants + i);
    group.sums[i / 16] += hn::GetLane(hn::SumOfLanes(Int32Tag(), quants));
  }
  group.scaled_sum = group.scale * static_cast<float>(group.sums[0] + group.sums[1]);
}

// The weights that one micro-tile reads: groups [first_group, end_group) of panels `panel_bytes`
// apart. The quants that lie `prefetch_offset` bytes behind each read are asked for, unless 0.
struct WeightTile {
  const PackedLayout* layout;
  const std::byte* first_panel;
  int64_t first_group;
  int64_t end_group;
  ptrdiff_t prefetch_offset;
};

// The integer dot products of one vector of columns with kRows rows, over vectors [j, kEnd) of a
// group. Arrays are unrolled by recursion and pragma, so that they live in registers.
template <DType kType, int kRows, int j, int kEnd, class Dot>
HWY_INLINE void AddProducts(const std::byte* quants, int vector, const ActivationGroup* x,
                            Dot* dots) {
  const auto weights = Dot::Prepare(LoadQuants<kType, j>(quants, vector));
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) dots[r].template Add<j>(weights, x[r].quants + j * 4);
  if constexpr (j + 1 < kEnd) AddProducts<kType, kRows, j + 1, kEnd>(quants, vector, x, dots);
}

// sum[r * kStride] += scale * (the dot products of part kPart of a group).
template <DType kType, int kRows, int kStride, int kPart>
HWY_INLINE void MultiplyPart(const std::byte* quants, int vector, FloatVector scale,
                             const ActivationGroup* x, FloatVector* sum) {
  constexpr BlockTraits kTraits = BlockTraitsOf(kType);
  constexpr bool kSigned = kTraits.low_bits == 8;
  constexpr int kMaxQuant = kSigned ? 128 : (16 << kTraits.high_bits) - 1;
  constexpr int kVectorsOfPart = kQuantVectors / kTraits.scales_per_group;
  using Dot = Int8Dot<kSigned, kMaxQuant>;
  constexpr int kZero = kTraits.zero_point + Dot::kBias;
  const FloatTag d;
  const Int32Tag di;
  Dot dots[kRows];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) dots[r].total = hn::Zero(di);
  AddProducts<kType, kRows, kPart * kVectorsOfPart, (kPart + 1) * kVectorsOfPart>(quants, vector, x,
                                                                                  dots);
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    Int32Vector total = dots[r].total;
    if constexpr (kZero != 0) {
      const int32_t activations =
          kTraits.scales_per_group == 2 ? x[r].sums[kPart] : x[r].sums[0] + x[r].sums[1];
      total = hn::Sub(total, hn::Set(di, kZero * activations));
    }
    sum[r * kStride] = hn::MulAdd(hn::ConvertTo(d, total), hn::Mul(scale, hn::Set(d, x[r].scale)),
                                  sum[r * kStride]);
  }
}

// sums [kRows][kPanels * 16] += x times the weights. For each group it reads GroupQuantBytes and
// GroupScaleBytes of each panel and 48 bytes of each row of x, and does kRows * kPanels * 512
// multiply-adds of bytes and 16 (with a minimum 32) of floats.
template <DType kType, int kRows, int kPanels>
void MultiplyTile(const WeightTile& weights, const ActivationGroup* HWY_RESTRICT x,
                  float* HWY_RESTRICT sums, ptrdiff_t sums_stride) {
  constexpr BlockTraits kTraits = BlockTraitsOf(kType);
  constexpr int kColumns = kPanels * kVectors;
  const FloatTag d;
  const PackedLayout layout = *weights.layout;
  FloatVector sum[kRows * kColumns];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int c = 0; c < kColumns; ++c) {
      sum[r * kColumns + c] = hn::Load(d, sums + r * sums_stride + c * kLanes);
    }
  }
  for (int64_t g = weights.first_group; g < weights.end_group; ++g, x += kRows) {
    HWY_UNROLL(4)
    for (int p = 0; p < kPanels; ++p) {
      const std::byte* panel = weights.first_panel + p * layout.panel_bytes;
      const std::byte* quants = panel + layout.quants_offset + g * GroupQuantBytes(kType);
      if (weights.prefetch_offset != 0) {
        for (int64_t line = 0; line < GroupQuantBytes(kType); line += 64) {
          hwy::Prefetch(quants + weights.prefetch_offset + line);
        }
      }
      HWY_UNROLL(16)
      for (int vector = 0; vector < kVectors; ++vector) {
        const GroupScales scales = LoadScales<kType>(layout, panel, g, vector);
        FloatVector* column = sum + p * kVectors + vector;
        MultiplyPart<kType, kRows, kColumns, 0>(quants, vector, scales.scale[0], x, column);
        if constexpr (kTraits.scales_per_group == 2) {
          MultiplyPart<kType, kRows, kColumns, 1>(quants, vector, scales.scale[1], x, column);
        }
        if constexpr (kTraits.has_minimum) {
          HWY_UNROLL(8)
          for (int r = 0; r < kRows; ++r) {
            column[r * kColumns] =
                hn::MulAdd(scales.minimum, hn::Set(d, x[r].scaled_sum), column[r * kColumns]);
          }
        }
      }
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int c = 0; c < kColumns; ++c) {
      hn::Store(sum[r * kColumns + c], d, sums + r * sums_stride + c * kLanes);
    }
  }
}

// Calls the micro-kernel of `rows` rows, which takes PanelsOfTile(rows) panels or one.
template <DType kType, int kRows = kMaxTileRows>
void MultiplyRows(int rows, int panels, const WeightTile& weights, const ActivationGroup* x,
                  float* sums, ptrdiff_t sums_stride) {
  if (rows == kRows) {
    constexpr int kPanels = PanelsOfTile(kRows);
    if (panels == kPanels) {
      MultiplyTile<kType, kRows, kPanels>(weights, x, sums, sums_stride);
    } else {
      for (int p = 0; p < panels; ++p) {
        WeightTile panel = weights;
        panel.first_panel += p * weights.layout->panel_bytes;
        MultiplyTile<kType, kRows, 1>(panel, x, sums + p * kPanelColumns, sums_stride);
      }
    }
  } else if constexpr (kRows > 1) {
    MultiplyRows<kType, kRows - 1>(rows, panels, weights, x, sums, sums_stride);
  }
}

// Weights are read from memory once: chunk by chunk of k, so that a chunk stays in the cache while
// every row tile meets it. A single tile needs no chunks and streams each panel whole.
template <DType kType>
void MultiplyType(const PanelTask& task, const ActivationGroup* x) {
  const PackedLayout& layout = *task.layout;
  const RowTiles& tiles = task.tiles;
  const int group = PanelsOfTile(tiles.Rows(0));
  const int64_t chunk = tiles.count == 1 ? layout.num_groups : kChunkGroups;
  const ptrdiff_t sums_stride = task.num_columns();
  for (int64_t g = 0; g < layout.num_groups; g += chunk) {
    for (int64_t panel = task.first_panel; panel < task.end_panel; panel += group) {
      const int panels = static_cast<int>(std::min<int64_t>(group, task.end_panel - panel));
      WeightTile weights;
      weights.layout = &layout;
      weights.first_panel = layout.Panel(task.weight->data, panel);
      weights.first_group = g;
      weights.end_group = std::min(g + chunk, layout.num_groups);
      weights.prefetch_offset = tiles.count == 1 ? kPrefetchBytes : group * layout.panel_bytes;
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t first_row = tiles.First(tile);
        const int rows = tiles.Rows(tile);
        MultiplyRows<kType>(
            rows, panels, weights, x + first_row * layout.num_groups + g * rows,
            task.sums + first_row * sums_stride + (panel - task.first_panel) * kPanelColumns,
            sums_stride);
        weights.prefetch_offset = 0;  // The first tile has brought the weights.
      }
    }
  }
}

void Multiply(const PanelTask& task, const ActivationGroup* x) {
  switch (task.weight->dtype) {
    case DType::kQ8_0:
      return MultiplyType<DType::kQ8_0>(task, x);
    case DType::kQ4_0:
      return MultiplyType<DType::kQ4_0>(task, x);
    case DType::kQ4_1:
      return MultiplyType<DType::kQ4_1>(task, x);
    case DType::kQ5_0:
      return MultiplyType<DType::kQ5_0>(task, x);
    case DType::kQ5_1:
      return MultiplyType<DType::kQ5_1>(task, x);
    case DType::kQ4_K:
      return MultiplyType<DType::kQ4_K>(task, x);
    case DType::kQ5_K:
      return MultiplyType<DType::kQ5_K>(task, x);
    case DType::kQ6_K:
      return MultiplyType<DType::kQ6_K>(task, x);
    default:
      return;
  }
}

constexpr Int8Kernel kKernel = {kMaxTileRows, &Quantise, &Multiply};
const Int8Kernel* KernelOfTarget() { return &kKernel; }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {

HWY_EXPORT(KernelOfTarget);

const Int8Kernel& GetInt8Kernel() { return *HWY_DYNAMIC_DISPATCH(KernelOfTarget)(); }

}  // namespace heddle
#endif
