#include "kernels/gemm/float_kernel.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/float_kernel.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/gemm/block_panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {

using D = FloatTag;
using V = FloatVector;

// Rows and panels of a micro-tile. Its sums live in registers (32 with AVX-512, else 16), next to a
// pair of weight vectors and an activation; fewer rows take more panels, for enough independent
// chains (4 cycles, two a cycle) and several streams from memory.
constexpr int kMaxTileRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 1;
constexpr int PanelsOfTile(int rows) {
  if (kLanes == 16) return rows <= 4 ? 4 : 2;
  if (kLanes == 8) return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
  return 1;
}

// k is worked off in chunks whose weights stay in the first-level cache while all rows meet them.
constexpr int64_t kChunk = 256;
// How far ahead of its use a stream of weights is asked for.
constexpr ptrdiff_t kPrefetchBytes = 1024;

// The weights that one micro-tile reads: `panel_stride` bytes apart, k_steps * 8 elements of k.
// What lies `prefetch_offset` bytes behind each read is asked for, unless that is 0.
struct WeightTile {
  const std::byte* data;
  ptrdiff_t panel_stride;
  ptrdiff_t
      scales_offset;  // from a panel's data to the [16] floats that scale it, if the type does
  int64_t k_steps;
  ptrdiff_t prefetch_offset;
};

struct NoScales {
  static HWY_INLINE NoScales Load(const WeightTile&, int /*column*/) { return {}; }
};

// Two consecutive k of kLanes columns, widened. `w` is at an even k of a panel.
struct Float32Weights {
  using Scales = NoScales;
  static constexpr ptrdiff_t kBytesPerK = kPanelColumns * 4;
  static HWY_INLINE void LoadPair(const std::byte* w, int vector, Scales, V& even, V& odd) {
    const auto* values = reinterpret_cast<const float*>(w) + vector * kLanes;
    even = hn::Load(D(), values);
    odd = hn::Load(D(), values + kPanelColumns);
  }
};

struct BFloat16Weights {
  using Scales = NoScales;
  static constexpr ptrdiff_t kBytesPerK = kPanelColumns * 2;
  static HWY_INLINE void LoadPair(const std::byte* w, int vector, Scales, V& even, V& odd) {
    const hn::RebindToUnsigned<D> du;
    const auto pairs = hn::Load(du, reinterpret_cast<const uint32_t*>(w) + vector * kLanes);
    even = hn::BitCast(D(), hn::ShiftLeft<16>(pairs));
    odd = hn::BitCast(D(), hn::And(pairs, hn::Set(du, 0xffff0000u)));
  }
};

struct Float16Weights {
  using Scales = NoScales;
  static constexpr ptrdiff_t kBytesPerK = kPanelColumns * 2;
  static HWY_INLINE void LoadPair(const std::byte* w, int vector, Scales, V& even, V& odd) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const auto* values = reinterpret_cast<const hwy::float16_t*>(w) + vector * kLanes;
    even = hn::PromoteTo(D(), hn::Load(dh, values));
    odd = hn::PromoteTo(D(), hn::Load(dh, values + kPanelColumns));
  }
};

// A code's bits are those of a float16 that is 2^-8 of its value.
struct Float8Weights {
  struct Scales {
    // Of the column-th vector of columns, counted through all panels.
    static HWY_INLINE Scales Load(const WeightTile& tile, int column) {
      const std::byte* panel = tile.data + column / kVectors * tile.panel_stride;
      return Of(reinterpret_cast<const float*>(panel + tile.scales_offset), column % kVectors);
    }
    static HWY_INLINE Scales Of(const float* scales, int vector) {
      return {hn::Mul(hn::Load(D(), scales + vector * kLanes), hn::Set(D(), 0x1p8f))};
    }
    V scale;
  };
  static constexpr ptrdiff_t kBytesPerK = kPanelColumns;
  static HWY_INLINE void LoadPair(const std::byte* w, int vector, Scales scales, V& even, V& odd) {
    const hn::Rebind<int16_t, D> d16;
    const hn::Rebind<hwy::float16_t, D> dh;
    const auto pairs = hn::Load(d16, reinterpret_cast<const int16_t*>(w) + vector * kLanes);
    // The shift leaves a copy of the sign where the larger exponent has a zero.
    const auto fields = hn::Set(d16, static_cast<int16_t>(0xbf80));
    const auto low = hn::And(hn::ShiftRight<1>(hn::ShiftLeft<8>(pairs)), fields);
    const auto high = hn::And(hn::ShiftRight<1>(pairs), fields);
    even = hn::Mul(hn::PromoteTo(D(), hn::BitCast(dh, low)), scales.scale);
    odd = hn::Mul(hn::PromoteTo(D(), hn::BitCast(dh, high)), scales.scale);
  }
};

// sums [kRows][kPanels * 16] += x [kRows, 8 k_steps] times the weights. For each 8 k it reads
// kPanels * 8 * kBytesPerK bytes of weights and kRows * 32 of x, and does kRows * kPanels * 128
// multiply-adds, each sum's in the order of k.
template <class Weights, int kRows, int kPanels>
void MultiplyTile(const WeightTile& weights, const float* HWY_RESTRICT x, float* HWY_RESTRICT sums,
                  ptrdiff_t sums_stride) {
  constexpr int kColumns = kPanels * kVectors;
  const D d;
  V sum[kRows][kColumns];
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int c = 0; c < kColumns; ++c) {
      sum[r][c] = hn::Load(d, sums + r * sums_stride + c * kLanes);
    }
  }
  typename Weights::Scales scale[kColumns];
  HWY_UNROLL(16)
  for (int c = 0; c < kColumns; ++c) scale[c] = Weights::Scales::Load(weights, c);
  const std::byte* HWY_RESTRICT w = weights.data;
  for (int64_t step = 0; step < weights.k_steps; ++step) {
    if (weights.prefetch_offset != 0) {
      HWY_UNROLL(16)
      for (int p = 0; p < kPanels; ++p) {
        HWY_UNROLL(16)
        for (ptrdiff_t line = 0; line < kPlainStep * Weights::kBytesPerK; line += 64) {
          hwy::Prefetch(w + p * weights.panel_stride + line + weights.prefetch_offset);
        }
      }
    }
    HWY_UNROLL(16)
    for (int k = 0; k < kPlainStep; k += 2) {
      V even[kColumns], odd[kColumns];
      HWY_UNROLL(16)
      for (int c = 0; c < kColumns; ++c) {
        Weights::LoadPair(w + c / kVectors * weights.panel_stride + k * Weights::kBytesPerK,
                          c % kVectors, scale[c], even[c], odd[c]);
      }
      HWY_UNROLL(16)
      for (int r = 0; r < kRows; ++r) {
        const V x_even = hn::Set(d, x[r * kPlainStep + k]);
        HWY_UNROLL(16)
        for (int c = 0; c < kColumns; ++c) sum[r][c] = hn::MulAdd(x_even, even[c], sum[r][c]);
      }
      HWY_UNROLL(16)
      for (int r = 0; r < kRows; ++r) {
        const V x_odd = hn::Set(d, x[r * kPlainStep + k + 1]);
        HWY_UNROLL(16)
        for (int c = 0; c < kColumns; ++c) sum[r][c] = hn::MulAdd(x_odd, odd[c], sum[r][c]);
      }
    }
    w += kPlainStep * Weights::kBytesPerK;
    x += kRows * kPlainStep;
  }
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int c = 0; c < kColumns; ++c) {
      hn::Store(sum[r][c], d, sums + r * sums_stride + c * kLanes);
    }
  }
}

// Calls the micro-kernel of `rows` rows, which takes PanelsOfTile(rows) panels or one.
template <class Weights, int kRows = kMaxTileRows>
void MultiplyRows(int rows, int panels, const WeightTile& weights, const float* x, float* sums,
                  ptrdiff_t sums_stride) {
  if (rows == kRows) {
    constexpr int kPanels = PanelsOfTile(kRows);
    if (panels == kPanels) {
      MultiplyTile<Weights, kRows, kPanels>(weights, x, sums, sums_stride);
    } else {
      for (int p = 0; p < panels; ++p) {
        WeightTile panel = weights;
        panel.data += p * weights.panel_stride;
        MultiplyTile<Weights, kRows, 1>(panel, x, sums + p * kPanelColumns, sums_stride);
      }
    }
  } else if constexpr (kRows > 1) {
    MultiplyRows<Weights, kRows - 1>(rows, panels, weights, x, sums, sums_stride);
  }
}

// All tiles times `panels` panels over k_steps from `first_step`.
template <class Weights>
void MultiplyPanels(const PanelTask& task, const float* x, WeightTile weights, int64_t first_step,
                    int64_t panel, int panels) {
  const ptrdiff_t sums_stride = task.num_columns();
  float* sums = task.sums + (panel - task.first_panel) * kPanelColumns;
  for (int64_t tile = 0; tile < task.tiles.count; ++tile) {
    const int64_t first_row = task.tiles.First(tile);
    const int rows = task.tiles.Rows(tile);
    MultiplyRows<Weights>(rows, panels, weights,
                          x + first_row * task.layout->padded_k + first_step * rows * kPlainStep,
                          sums + first_row * sums_stride, sums_stride);
    weights.prefetch_offset = 0;  // The first tile has brought the weights.
  }
}

// Weights are read from memory once: chunk by chunk of k, so that a chunk stays in the cache while
// every row tile meets it. A single tile needs no chunks and streams each panel whole.
template <class Weights>
void MultiplyPlain(const PanelTask& task, const float* x) {
  const PackedLayout& layout = *task.layout;
  const int group = PanelsOfTile(task.tiles.Rows(0));
  const int64_t chunk = task.tiles.count == 1 ? layout.padded_k : kChunk;
  for (int64_t k = 0; k < layout.padded_k; k += chunk) {
    const int64_t k_count = std::min(chunk, layout.padded_k - k);
    for (int64_t panel = task.first_panel; panel < task.end_panel; panel += group) {
      const int panels = static_cast<int>(std::min<int64_t>(group, task.end_panel - panel));
      WeightTile weights;
      weights.data = layout.Panel(task.weight->data, panel) + k * Weights::kBytesPerK;
      weights.panel_stride = layout.panel_bytes;
      weights.scales_offset = 0;
      weights.k_steps = k_count / kPlainStep;
      weights.prefetch_offset = task.tiles.count == 1 ? kPrefetchBytes : group * layout.panel_bytes;
      MultiplyPanels<Weights>(task, x, weights, k / kPlainStep, panel, panels);
    }
  }
}

// How the panels of a quantised type are widened: elements [k, k + count) to out [count][16], where
// both are multiples of 32, or count ends the panel.
template <DType kType>
struct BlockWidening {
  static void Widen(const PackedLayout& layout, const std::byte* panel, int64_t k, int64_t count,
                    float* out) {
    for (int64_t i = 0; i < count; i += kGroupElements) {
      DequantisePanelGroup<kType>(layout, panel, (k + i) / kGroupElements, out + i * kPanelColumns);
    }
  }
};

// Calls f(k, end, block) for each part of [k, end) whose elements share a scale.
template <class F>
HWY_INLINE void ForEachScaleBlock(const PackedLayout& layout, int64_t k, int64_t end, F f) {
  while (k < end) {
    const int64_t block = (layout.block_offset + k) / layout.block_columns;
    const int64_t block_end = (block + 1) * layout.block_columns - layout.block_offset;
    f(k, std::min(block_end, end), block);
    k = block_end;
  }
}

struct Float8Widening {
  static void Widen(const PackedLayout& layout, const std::byte* panel, int64_t first_k,
                    int64_t count, float* HWY_RESTRICT out) {
    const std::byte* HWY_RESTRICT codes = panel + layout.quants_offset;
    const auto* scales = reinterpret_cast<const float*>(panel);
    ForEachScaleBlock(
        layout, first_k, first_k + count, [&](int64_t begin, int64_t end, int64_t block) HWY_ATTR {
          for (int vector = 0; vector < kVectors; ++vector) {
            const auto scale = Float8Weights::Scales::Of(scales + block * kPanelColumns, vector);
            for (int64_t k = begin / 2 * 2; k < end; k += 2) {
              V even, odd;
              Float8Weights::LoadPair(codes + k * kPanelColumns, vector, scale, even, odd);
              float* target = out + (k - first_k) * kPanelColumns + vector * kLanes;
              // A block may begin or end between the two.
              if (k >= begin) hn::Store(even, D(), target);
              if (k + 1 < end) hn::Store(odd, D(), target + kPanelColumns);
            }
          }
        });
  }
};

// As MultiplyPlain, but a chunk is widened once, into `scratch`, which then is multiplied as
// float32 weights are.
template <class Widening>
void MultiplyWidened(const PanelTask& task, const float* x) {
  const PackedLayout& layout = *task.layout;
  constexpr int kMaxPanels = 4;
  constexpr int64_t kWidenedChunk = 128;  // 8 KiB of scratch a panel
  alignas(64) float scratch[kMaxPanels][kWidenedChunk * kPanelColumns];
  const int group = PanelsOfTile(task.tiles.Rows(0));
  const int64_t chunk = task.tiles.count == 1 ? layout.padded_k : kWidenedChunk;
  for (int64_t first_k = 0; first_k < layout.padded_k; first_k += chunk) {
    const int64_t end_k = std::min(first_k + chunk, layout.padded_k);
    for (int64_t panel = task.first_panel; panel < task.end_panel; panel += group) {
      const int panels = static_cast<int>(std::min<int64_t>(group, task.end_panel - panel));
      for (int64_t k = first_k; k < end_k; k += kWidenedChunk) {
        const int64_t count = std::min(kWidenedChunk, end_k - k);
        for (int p = 0; p < panels; ++p) {
          Widening::Widen(layout, layout.Panel(task.weight->data, panel + p), k, count, scratch[p]);
        }
        WeightTile weights;
        weights.data = reinterpret_cast<const std::byte*>(scratch);
        weights.panel_stride = sizeof(scratch[0]);
        weights.scales_offset = 0;
        weights.k_steps = count / kPlainStep;
        weights.prefetch_offset = 0;
        MultiplyPanels<Float32Weights>(task, x, weights, k / kPlainStep, panel, panels);
      }
    }
  }
}

// A single tile widens in registers, where scales change at whole steps of k. It gives the bits
// that the other way does: each weight is rounded once.
void MultiplyFloat8(const PanelTask& task, const float* x) {
  const PackedLayout& layout = *task.layout;
  if (task.tiles.count > 1 || layout.block_columns % kPlainStep != 0) {
    MultiplyWidened<Float8Widening>(task, x);
    return;
  }
  const int group = PanelsOfTile(task.tiles.Rows(0));
  for (int64_t panel = task.first_panel; panel < task.end_panel; panel += group) {
    const int panels = static_cast<int>(std::min<int64_t>(group, task.end_panel - panel));
    ForEachScaleBlock(layout, 0, layout.padded_k, [&](int64_t k, int64_t end, int64_t block) {
      WeightTile weights;
      const int64_t offset = layout.quants_offset + k * Float8Weights::kBytesPerK;
      weights.data = layout.Panel(task.weight->data, panel) + offset;
      weights.panel_stride = layout.panel_bytes;
      weights.scales_offset = block * kPanelColumns * static_cast<int64_t>(sizeof(float)) - offset;
      weights.k_steps = (end - k) / kPlainStep;
      weights.prefetch_offset = kPrefetchBytes;
      MultiplyPanels<Float8Weights>(task, x, weights, k / kPlainStep, panel, panels);
    });
  }
}

void Multiply(const PanelTask& task, const float* x) {
  switch (task.weight->dtype) {
    case DType::kFloat32:
      return MultiplyPlain<Float32Weights>(task, x);
    case DType::kBFloat16:
      return MultiplyPlain<BFloat16Weights>(task, x);
    case DType::kFloat16:
      return MultiplyPlain<Float16Weights>(task, x);
    case DType::kFloat8E4M3:
      return MultiplyFloat8(task, x);
    case DType::kQ8_0:
      return MultiplyWidened<BlockWidening<DType::kQ8_0>>(task, x);
    case DType::kQ4_0:
      return MultiplyWidened<BlockWidening<DType::kQ4_0>>(task, x);
    case DType::kQ4_1:
      return MultiplyWidened<BlockWidening<DType::kQ4_1>>(task, x);
    case DType::kQ5_0:
      return MultiplyWidened<BlockWidening<DType::kQ5_0>>(task, x);
    case DType::kQ5_1:
      return MultiplyWidened<BlockWidening<DType::kQ5_1>>(task, x);
    case DType::kQ4_K:
      return MultiplyWidened<BlockWidening<DType::kQ4_K>>(task, x);
    case DType::kQ5_K:
      return MultiplyWidened<BlockWidening<DType::kQ5_K>>(task, x);
    case DType::kQ6_K:
      return MultiplyWidened<BlockWidening<DType::kQ6_K>>(task, x);
    default:
      return;
  }
}

constexpr FloatKernel kKernel = {kMaxTileRows, &Multiply};
const FloatKernel* KernelOfTarget() { return &kKernel; }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {

HWY_EXPORT(KernelOfTarget);

const FloatKernel& GetFloatKernel() { return *HWY_DYNAMIC_DISPATCH(KernelOfTarget)(); }

}  // namespace heddle
#endif
