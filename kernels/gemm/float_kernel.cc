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

// Two consecutive k of kLanes columns, widened. `w` is at an even k of a panel.
struct Float32Weights {
  static constexpr ptrdiff_t kBytesPerK = kPanelColumns * 4;
  static HWY_INLINE void LoadPair(const std::byte* w, int vector, V& even, V& odd) {
    const auto* values = reinterpret_cast<const float*>(w) + vector * kLanes;
    even = hn::Load(D(), values);
    odd = hn::Load(D(), values + kPanelColumns);
  }
};

struct BFloat16Weights {
  static constexpr ptrdiff_t kBytesPerK = kPanelColumns * 2;
  static HWY_INLINE void LoadPair(const std::byte* w, int vector, V& even, V& odd) {
    const hn::RebindToUnsigned<D> du;
    const auto pairs = hn::Load(du, reinterpret_cast<const uint32_t*>(w) + vector * kLanes);
    even = hn::BitCast(D(), hn::ShiftLeft<16>(pairs));
    odd = hn::BitCast(D(), hn::And(pairs, hn::Set(du, 0xffff0000u)));
  }
};

struct Float16Weights {
  static constexpr ptrdiff_t kBytesPerK = kPanelColumns * 2;
  static HWY_INLINE void LoadPair(const std::byte* w, int vector, V& even, V& odd) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const auto* values = reinterpret_cast<const hwy::float16_t*>(w) + vector * kLanes;
    even = hn::PromoteTo(D(), hn::Load(dh, values));
    odd = hn::PromoteTo(D(), hn::Load(dh, values + kPanelColumns));
  }
};

// The weights that one micro-tile reads: `panel_stride` bytes apart, k_steps * 8 elements of k.
// What lies `prefetch_offset` bytes behind each read is asked for, unless that is 0.
struct WeightTile {
  const std::byte* data;
  ptrdiff_t panel_stride;
  int64_t k_steps;
  ptrdiff_t prefetch_offset;
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
                          c % kVectors, even[c], odd[c]);
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
      weights.k_steps = k_count / kPlainStep;
      weights.prefetch_offset = task.tiles.count == 1 ? kPrefetchBytes : group * layout.panel_bytes;
      MultiplyPanels<Weights>(task, x, weights, k / kPlainStep, panel, panels);
    }
  }
}

// Blocks are widened once a chunk into `scratch`, which then is multiplied as float32 weights are.
template <DType kType>
void MultiplyBlocks(const PanelTask& task, const float* x) {
  const PackedLayout& layout = *task.layout;
  constexpr int kMaxPanels = 4;
  constexpr int64_t kGroups = 4;  // a chunk: 8 KiB of scratch a panel
  alignas(64) float scratch[kMaxPanels][kGroups * kGroupElements * kPanelColumns];
  const int group = PanelsOfTile(task.tiles.Rows(0));
  for (int64_t g = 0; g < layout.num_groups; g += kGroups) {
    const int64_t groups = std::min(kGroups, layout.num_groups - g);
    for (int64_t panel = task.first_panel; panel < task.end_panel; panel += group) {
      const int panels = static_cast<int>(std::min<int64_t>(group, task.end_panel - panel));
      for (int p = 0; p < panels; ++p) {
        const std::byte* data = layout.Panel(task.weight->data, panel + p);
        for (int64_t i = 0; i < groups; ++i) {
          DequantisePanelGroup<kType>(layout, data, g + i,
                                      scratch[p] + i * kGroupElements * kPanelColumns);
        }
      }
      WeightTile weights;
      weights.data = reinterpret_cast<const std::byte*>(scratch);
      weights.panel_stride = sizeof(scratch[0]);
      weights.k_steps = groups * (kGroupElements / kPlainStep);
      weights.prefetch_offset = 0;
      MultiplyPanels<Float32Weights>(task, x, weights, g * (kGroupElements / kPlainStep), panel,
                                     panels);
    }
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
    case DType::kQ8_0:
      return MultiplyBlocks<DType::kQ8_0>(task, x);
    case DType::kQ4_0:
      return MultiplyBlocks<DType::kQ4_0>(task, x);
    case DType::kQ4_1:
      return MultiplyBlocks<DType::kQ4_1>(task, x);
    case DType::kQ5_0:
      return MultiplyBlocks<DType::kQ5_0>(task, x);
    case DType::kQ5_1:
      return MultiplyBlocks<DType::kQ5_1>(task, x);
    case DType::kQ4_K:
      return MultiplyBlocks<DType::kQ4_K>(task, x);
    case DType::kQ5_K:
      return MultiplyBlocks<DType::kQ5_K>(task, x);
    case DType::kQ6_K:
      return MultiplyBlocks<DType::kQ6_K>(task, x);
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
