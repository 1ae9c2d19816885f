// Every weight is read from memory once for a block of up to kBlockRows rows, by one thread; all
// else (packed activations, sums) is small beside it and stays in the caches.
#include "kernels/gemm/linear_cpu.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/float_kernel.h"
#include "kernels/gemm/int8_kernel.h"
#include "kernels/gemm/panel_task.h"

namespace heddle {
namespace {

constexpr int64_t kBlockRows = 96;         // their activations of a chunk of k fit the L2 cache
constexpr int64_t kMaxSums = 32 * 1024;    // floats of a task's sums: 128 KiB of stack
constexpr int64_t kTaskPanels = 4;         // tasks are multiples of this
constexpr int64_t kTasksPerThread = 8;     // enough to even out threads of unequal speed
constexpr int64_t kSerialPacking = 16384;  // elements that are not worth a dispatch

// A row of x; null where x has no columns, since its data may then be null.
const float* RowOf(const ConstMatrixView& x, int64_t row) {
  return x.cols > 0 ? x.Row<float>(row) : nullptr;
}

// Rows [first_row, first_row + tile rows) of x as FloatKernel reads them.
void PackFloatTile(const LinearArgs& args, const PackedLayout& layout, int64_t first_row, int rows,
                   float* tile) {
  if (layout.padded_k == 0) return;  // there is no tile
  for (int r = 0; r < rows; ++r) {
    const float* x = RowOf(args.x, first_row + r);
    float* target = tile + r * kPlainStep;
    for (int64_t k = -layout.lead; k + layout.lead < layout.padded_k; k += kPlainStep) {
      if (k >= 0 && k + kPlainStep <= args.x.cols) {
        std::memcpy(target, x + k, kPlainStep * sizeof(float));
      } else {
        for (int i = 0; i < kPlainStep; ++i) {
          target[i] = k + i >= 0 && k + i < args.x.cols ? x[k + i] : 0.0f;
        }
      }
      target += rows * kPlainStep;
    }
  }
}

// The same as Int8Kernel reads them.
void QuantiseTile(const LinearArgs& args, const PackedLayout& layout, int64_t first_row, int rows,
                  const Int8Kernel& kernel, ActivationGroup* tile) {
  for (int r = 0; r < rows; ++r) {
    const float* x = RowOf(args.x, first_row + r);
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      const int64_t k = g * kGroupElements - layout.lead;
      const int64_t begin = std::max<int64_t>(k, 0);
      const int64_t end = std::min(k + kGroupElements, args.x.cols);
      kernel.quantise(x + begin, static_cast<int>(begin - k), static_cast<int>(end - begin),
                      tile[g * rows + r]);
    }
  }
}

// Sums begin with the bias.
void StartSums(const LinearArgs& args, const PanelTask& task) {
  const int64_t columns = task.num_columns();
  const int64_t first = task.first_panel * kPanelColumns;
  std::fill_n(task.sums, columns * task.tiles.rows, 0.0f);
  if (args.bias == nullptr) return;
  for (int64_t r = 0; r < task.tiles.rows; ++r) {
    std::copy_n(args.bias + first, std::min(columns, args.out.cols - first),
                task.sums + r * columns);
  }
}

void StoreSums(const LinearArgs& args, const PanelTask& task, int64_t first_row) {
  const int64_t columns = task.num_columns();
  const int64_t first = task.first_panel * kPanelColumns;
  for (int64_t r = 0; r < task.tiles.rows; ++r) {
    std::copy_n(task.sums + r * columns, std::min(columns, args.out.cols - first),
                args.out.Row<float>(first_row + r) + first);
  }
}

// Multiplies rows [first_row, first_row + tiles.rows). X is what `pack_tile` makes of activations,
// `x_per_row` of them a row, and `multiply` takes.
template <typename X, typename PackTile, typename Multiply>
void MultiplyRowBlock(const LinearArgs& args, const PackedLayout& layout, int64_t first_row,
                      RowTiles tiles, int64_t x_per_row, PackTile pack_tile, Multiply multiply,
                      CpuThreadPool& pool) {
  auto* x = reinterpret_cast<X*>(pool.Scratch(tiles.rows * x_per_row * sizeof(X)));
  const auto pack = [&](int64_t tile) {
    const int64_t first = tiles.First(tile);
    pack_tile(first_row + first, tiles.Rows(tile), x + first * x_per_row);
  };
  if (tiles.rows * args.x.cols <= kSerialPacking) {
    for (int64_t tile = 0; tile < tiles.count; ++tile) pack(tile);
  } else {
    pool.ParallelFor(tiles.count, pack);
  }

  const int64_t units = (layout.num_panels + kTaskPanels - 1) / kTaskPanels;
  const int64_t max_units = kMaxSums / (kTaskPanels * kPanelColumns * tiles.rows);
  const int64_t num_tasks = std::max((units + max_units - 1) / max_units,
                                     std::min(units, pool.num_threads() * kTasksPerThread));
  pool.ParallelFor(num_tasks, [&](int64_t i) {
    alignas(64) float sums[kMaxSums];
    const int64_t first_panel = i * units / num_tasks * kTaskPanels;
    const int64_t end_panel =
        std::min((i + 1) * units / num_tasks * kTaskPanels, layout.num_panels);
    const PanelTask task = {&args.weight, &layout, first_panel, end_panel, tiles, sums};
    StartSums(args, task);
    multiply(task, x);
    StoreSums(args, task, first_row);
  });
}

void Multiply(const LinearArgs& args, CpuThreadPool& pool) {
  if (args.x.rows == 0 || args.weight.n == 0) return;
  const PackedLayout layout = PackedLayout::Of(args.weight);
  const FloatKernel& float_kernel = GetFloatKernel();
  const Int8Kernel& int8_kernel = GetInt8Kernel();
  // Blocks of equal size, so that the last is no remainder.
  const RowTiles blocks(args.x.rows, kBlockRows);
  for (int64_t block = 0; block < blocks.count; ++block) {
    const int64_t first_row = blocks.First(block);
    const int64_t rows = blocks.Rows(block);
    if (args.precision == ActivationPrecision::kInt8) {
      MultiplyRowBlock<ActivationGroup>(
          args, layout, first_row, RowTiles(rows, int8_kernel.max_tile_rows), layout.num_groups,
          [&](int64_t first, int tile_rows, ActivationGroup* tile) {
            QuantiseTile(args, layout, first, tile_rows, int8_kernel, tile);
          },
          int8_kernel.multiply, pool);
    } else {
      MultiplyRowBlock<float>(
          args, layout, first_row, RowTiles(rows, float_kernel.max_tile_rows), layout.padded_k,
          [&](int64_t first, int tile_rows, float* tile) {
            PackFloatTile(args, layout, first, tile_rows, tile);
          },
          float_kernel.multiply, pool);
    }
  }
}

}  // namespace

absl::Status LinearCpu(const LinearArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateLinear(args));
  const PackedWeight& weight = args.weight;
  RETURN_IF_ERROR(PackedLayout::Create(weight.dtype, weight.n, weight.k, weight.k_offset).status());
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    Multiply(args, pool);
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
