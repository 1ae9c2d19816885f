// A task multiplies some of a head's rows by some of its panels. Each weight is read from memory
// once for a block of up to kBlockRows rows; a head has few tasks, each of which packs its rows.
#include <algorithm>
#include <atomic>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/linear_cpu.h"
#include "kernels/gemm/panel_product.h"

namespace heddle {
namespace {

class HeadProduct {
 public:
  HeadProduct(const HeadLinearArgs& args, int num_threads)
      : args_(args),
        product_(args.weights.first, ActivationPrecision::kFloat32),
        blocks_(args.x.tokens, kBlockRows) {
    const int64_t wanted = num_threads * kTasksPerThread;
    const int64_t pieces = args.x.heads * blocks_.count;
    const int64_t max_rows = (args.x.tokens + blocks_.count - 1) / blocks_.count;
    const int64_t max_units = PanelProduct::MaxTaskUnits(max_rows);
    const int64_t least = (product_.num_units() + max_units - 1) / max_units;
    splits_ = std::clamp((wanted + pieces - 1) / pieces, least, product_.num_units());
    bytes_per_thread_ = (max_rows * product_.bytes_per_row() + 127) / 128 * 128;
  }

  int64_t num_tasks() const { return args_.x.heads * blocks_.count * splits_; }
  int64_t bytes_per_thread() const { return bytes_per_thread_; }

  void Run(int64_t task, std::byte* memory) const {
    const int64_t split = task % splits_;
    const int64_t head = task / splits_ % args_.x.heads;
    const int64_t block = task / splits_ / args_.x.heads;
    const int64_t first_row = blocks_.First(block);
    const RowTiles tiles = product_.Tiles(blocks_.Rows(block));
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t first = tiles.First(tile);
      const auto row = [&](int r) -> const float* {
        return args_.x.dim > 0 ? args_.x.At(first_row + first + r, head) : nullptr;
      };
      product_.PackTile(tiles.Rows(tile), row, memory + first * product_.bytes_per_row());
    }
    const MatrixView out = {args_.out.At(0, head), DType::kFloat32, args_.out.tokens, args_.out.dim,
                            args_.out.token_stride};
    const int64_t units = product_.num_units();
    product_.Multiply(args_.weights.at(head), /*bias=*/nullptr, memory, tiles,
                      {split * units / splits_, (split + 1) * units / splits_}, out, first_row);
  }

 private:
  const HeadLinearArgs& args_;
  const PanelProduct product_;
  const RowTiles blocks_;  // of equal size, so that the last is no remainder
  int64_t splits_;         // of a head's panels
  int64_t bytes_per_thread_;
};

}  // namespace

absl::Status HeadLinearCpu(const HeadLinearArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateHeadLinear(args));
  const PackedWeight& weight = args.weights.first;
  RETURN_IF_ERROR(PackedLayout::Create(weight).status());
  if (args.x.tokens == 0 || args.x.heads == 0 || weight.n == 0) return absl::OkStatus();
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const HeadProduct product(args, pool.num_threads());
    std::byte* memory = pool.Scratch(pool.num_threads() * product.bytes_per_thread());
    std::atomic<int64_t> next_task{0};
    pool.ParallelRun([&](int thread) {
      for (int64_t i;
           (i = next_task.fetch_add(1, std::memory_order_relaxed)) < product.num_tasks();) {
        product.Run(i, memory + thread * product.bytes_per_thread());
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
