// All experts' products form one list of tasks, so that no thread waits while another works off a
// large expert.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/linear_cpu.h"
#include "kernels/gemm/panel_product.h"

namespace heddle {
namespace {

// Packed activations at a time: enough blocks to keep threads busy, little enough to stay near.
constexpr int64_t kMaxPackedBytes = int64_t{16} << 20;
// Reading a weight takes about as long as multiplying it with this many rows.
constexpr int64_t kReadingRows = 8;

// Up to kBlockRows entries of one expert.
struct Block {
  int64_t expert;
  int64_t first_entry;
  RowTiles tiles;
  int64_t packed_row;  // where its packed activations begin
};

struct PackTask {
  int64_t first_entry;
  int rows;
  int64_t packed_row;
};

absl::Status CheckEntries(const GroupedLinearArgs& args) {
  const int64_t experts = args.weights.count;
  for (int64_t e = 0; e <= experts; ++e) {
    const int64_t least = e == 0 ? 0 : args.expert_starts[e - 1];
    const int64_t most = e == 0 ? 0 : args.out.rows;
    if (args.expert_starts[e] < least || args.expert_starts[e] > most) {
      return absl::OutOfRangeError(absl::StrCat("grouped_linear: expert_starts[", e, "] is ",
                                                args.expert_starts[e], ", not in [", least, ", ",
                                                most, "]"));
    }
  }
  if (args.entry_tokens == nullptr) return absl::OkStatus();
  for (int64_t i = 0; i < args.expert_starts[experts]; ++i) {
    if (args.entry_tokens[i] < 0 || args.entry_tokens[i] >= args.x.rows) {
      return absl::OutOfRangeError(absl::StrCat("grouped_linear: entry ", i, " is of token ",
                                                args.entry_tokens[i], " of ", args.x.rows));
    }
  }
  return absl::OkStatus();
}

class GroupedProduct {
 public:
  GroupedProduct(const GroupedLinearArgs& args, CpuThreadPool& pool)
      : args_(args),
        product_(args.weights.first, args.precision),
        pool_(pool),
        max_rows_(kMaxPackedBytes / std::max<int64_t>(1, product_.bytes_per_row())),
        single_rows_(args.x.rows, -1) {}

  void Run() {
    if (args_.weights.first.n == 0) return;
    for (int64_t expert = 0; expert < args_.weights.count; ++expert) {
      const int64_t first = args_.expert_starts[expert];
      // Blocks of equal size, so that the last is no remainder.
      const RowTiles blocks(args_.expert_starts[expert + 1] - first, kBlockRows);
      for (int64_t i = 0; i < blocks.count; ++i) {
        Add(expert, first + blocks.First(i), blocks.Rows(i));
      }
    }
    Flush();
  }

 private:
  void Add(int64_t expert, int64_t first_entry, int rows) {
    if (num_rows_ > 0 && num_rows_ + rows > max_rows_) Flush();
    int64_t packed_row = num_rows_;
    if (rows == 1) {
      // In decoding a token meets several experts alone: it is packed for all of them at once.
      int64_t& known = single_rows_[RowIndex(first_entry)];
      if (known < 0) known = num_rows_;
      packed_row = known;
    }
    const RowTiles tiles = product_.Tiles(rows);
    blocks_.push_back({expert, first_entry, tiles, packed_row});
    if (packed_row < num_rows_) return;
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t first = tiles.First(tile);
      pack_tasks_.push_back({first_entry + first, tiles.Rows(tile), packed_row + first});
    }
    num_rows_ += rows;
  }

  // Works off the blocks collected so far.
  void Flush() {
    packed_ = pool_.Scratch(num_rows_ * product_.bytes_per_row());
    PackBlocks();
    MultiplyBlocks();
    for (const Block& block : blocks_) {
      if (block.tiles.rows == 1) single_rows_[RowIndex(block.first_entry)] = -1;
    }
    blocks_.clear();
    pack_tasks_.clear();
    num_rows_ = 0;
  }

  std::byte* PackedRow(int64_t row) const { return packed_ + row * product_.bytes_per_row(); }

  // Of x.
  int64_t RowIndex(int64_t entry) const {
    return args_.entry_tokens == nullptr ? entry : args_.entry_tokens[entry];
  }

  void PackBlocks() {
    const auto pack = [this](int64_t i) {
      const PackTask& task = pack_tasks_[i];
      product_.PackTile(
          task.rows, [&](int r) { return RowOrNull(args_.x, RowIndex(task.first_entry + r)); },
          PackedRow(task.packed_row));
    };
    const auto num_tasks = static_cast<int64_t>(pack_tasks_.size());
    if (num_rows_ * args_.x.cols <= kSerialPacking) {
      for (int64_t i = 0; i < num_tasks; ++i) pack(i);
    } else {
      pool_.ParallelFor(num_tasks, pack);
    }
  }

  // Cuts each block into tasks of about equal cost.
  void MultiplyBlocks() {
    struct Task {
      const Block* block;
      UnitRange units;
    };
    const int64_t units = product_.num_units();
    const auto cost = [units](const Block& block) {
      return units * (kReadingRows + block.tiles.rows);
    };
    int64_t total = 0;
    for (const Block& block : blocks_) total += cost(block);
    const int64_t cost_per_task = total / (pool_.num_threads() * kTasksPerThread) + 1;
    std::vector<Task> tasks;
    for (const Block& block : blocks_) {
      const int64_t max_units = PanelProduct::MaxTaskUnits(block.tiles.rows);
      const int64_t count = std::max((units + max_units - 1) / max_units,
                                     std::min(units, cost(block) / cost_per_task + 1));
      for (int64_t i = 0; i < count; ++i) {
        tasks.push_back({&block, {i * units / count, (i + 1) * units / count}});
      }
    }
    pool_.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
      const auto& [block, range] = tasks[i];
      product_.Multiply(args_.weights.at(block->expert), /*bias=*/nullptr,
                        PackedRow(block->packed_row), block->tiles, range, args_.out,
                        block->first_entry);
    });
  }

  const GroupedLinearArgs& args_;
  const PanelProduct product_;
  CpuThreadPool& pool_;
  const int64_t max_rows_;  // packed at a time, if a block is not more
  // What is collected for the next Flush.
  std::vector<Block> blocks_;
  std::vector<PackTask> pack_tasks_;
  int64_t num_rows_ = 0;              // packed
  std::vector<int64_t> single_rows_;  // [x.rows] where a row is packed as a tile of its own, or -1
  std::byte* packed_ = nullptr;
};

}  // namespace

absl::Status GroupedLinearCpu(const GroupedLinearArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateGroupedLinear(args));
  ASSIGN_OR_RETURN(const int64_t bytes, PackedWeightBytesCpu(args.weights.first));
  if (args.weights.count > 1 && args.weights.stride_bytes < bytes) {
    return absl::InvalidArgumentError(absl::StrCat("grouped_linear: weights of ", bytes,
                                                   " bytes are ", args.weights.stride_bytes,
                                                   " bytes apart"));
  }
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    RETURN_IF_ERROR(CheckEntries(args));
    GroupedProduct(args, pool).Run();
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
