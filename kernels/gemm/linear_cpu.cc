#include "kernels/gemm/linear_cpu.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/panel_product.h"

namespace heddle {
namespace {

// Multiplies rows [first_row, first_row + rows).
void MultiplyRowBlock(const LinearArgs& args, const PanelProduct& product, int64_t first_row,
                      int64_t rows, CpuThreadPool& pool) {
  const RowTiles tiles = product.Tiles(rows);
  std::byte* block = pool.Scratch(rows * product.bytes_per_row());
  const auto pack = [&](int64_t tile) {
    const int64_t first = tiles.First(tile);
    product.PackTile(
        tiles.Rows(tile), [&](int r) { return RowOrNull(args.x, first_row + first + r); },
        block + first * product.bytes_per_row());
  };
  if (rows * args.x.cols <= kSerialPacking) {
    for (int64_t tile = 0; tile < tiles.count; ++tile) pack(tile);
  } else {
    pool.ParallelFor(tiles.count, pack);
  }

  const int64_t units = product.num_units();
  const int64_t max_units = PanelProduct::MaxTaskUnits(rows);
  const int64_t num_tasks = std::max((units + max_units - 1) / max_units,
                                     std::min(units, pool.num_threads() * kTasksPerThread));
  pool.ParallelFor(num_tasks, [&](int64_t i) {
    product.Multiply(args.weight, args.bias, block, tiles,
                     {i * units / num_tasks, (i + 1) * units / num_tasks}, args.out, first_row);
  });
}

void Multiply(const LinearArgs& args, CpuThreadPool& pool) {
  if (args.x.rows == 0 || args.weight.n == 0) return;
  const PanelProduct product(args.weight, args.precision);
  // Blocks of equal size, so that the last is no remainder.
  const RowTiles blocks(args.x.rows, kBlockRows);
  for (int64_t block = 0; block < blocks.count; ++block) {
    MultiplyRowBlock(args, product, blocks.First(block), blocks.Rows(block), pool);
  }
}

}  // namespace

absl::Status LinearCpu(const LinearArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateLinear(args));
  RETURN_IF_ERROR(PackedLayout::Create(args.weight).status());
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    Multiply(args, pool);
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
