// Per query token, head and visible key: nope_dim + rope_dim multiply-adds for the score, v_dim for
// the output, an exponential. A task is one head of a block of query tokens; it copies each block
// of that head's keys and values together, as they lie far apart, for all its rows to meet.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/mla_prefill.h"
#include "kernels/attention/mla_tile.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/mla_prefill_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/attention/mla_panel_scores-inl.h"
#include "kernels/attention/mla_tile-inl.h"

#ifndef HEDDLE_KERNELS_ATTENTION_MLA_PREFILL_CPU_ONCE_
#define HEDDLE_KERNELS_ATTENTION_MLA_PREFILL_CPU_ONCE_
namespace heddle {

static_assert(kMlaPieceAlignment == kMlaBlock);

// Query tokens [first_token, first_token + num_tokens) of a sequence, for each head.
struct PrefillTask {
  int64_t sequence = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
};

// The working memory of a thread, in floats.
struct PrefillSizes {
  PrefillSizes(const MlaPrefillArgs& args, int64_t max_rows_in)
      : max_rows(max_rows_in),
        key_dims(args.q.dim),
        out_stride(MlaTile::WholeVectors(args.out.dim)),
        key_stride(MlaTile::KeyStride(key_dims + args.out.dim)),
        padded_rows(MlaTile::PaddedRows(max_rows)),
        queries(MlaTile::Queries(max_rows, key_dims)),
        keys(kMlaBlock * key_stride),
        per_thread(queries + keys + MlaTile::Scores() + max_rows * out_stride + 4 * padded_rows) {}

  int64_t max_rows;  // of a task
  int64_t key_dims;
  int64_t out_stride;
  int64_t key_stride;
  int64_t padded_rows;
  int64_t queries;
  int64_t keys;
  int64_t per_thread;
};

}  // namespace heddle
#endif  // HEDDLE_KERNELS_ATTENTION_MLA_PREFILL_CPU_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {

// One head of one task.
class PrefillRunner {
 public:
  PrefillRunner(const MlaPrefillArgs& args, const PrefillSizes& sizes, const PrefillTask& task,
                int64_t head, float* memory)
      : args_(args), sizes_(sizes), task_(task), head_(head) {
    queries_ = memory;
    keys_ = queries_ + sizes.queries;
    float* scores = keys_ + sizes.keys;
    float* out = scores + MlaTile::Scores();
    float* figures = out + sizes.max_rows * sizes.out_stride;
    rows_ = {.rows = task.num_tokens,
             .value_dims = args.out.dim,
             .out_stride = sizes.out_stride,
             .scores = scores,
             .count = figures,
             .maximum = figures + sizes.padded_rows,
             .sum = figures + 2 * sizes.padded_rows,
             .factor = figures + 3 * sizes.padded_rows,
             .out = out};
    std::fill_n(figures, sizes.padded_rows, 0.0f);  // rows past the end see nothing
  }

  void Run() {
    ClearPanels(rows_.rows, sizes_.key_dims, queries_);
    for (int64_t row = 0; row < rows_.rows; ++row) {
      PackRow(args_.q.At(task_.first_token + row, head_), sizes_.key_dims, 0, row, rows_.rows,
              sizes_.key_dims, queries_);
    }
    LoadState();
    const int64_t begin = args_.segment_starts[task_.sequence];
    const int64_t end = args_.segment_starts[task_.sequence + 1];
    const int64_t first_position = args_.segment_first_positions[task_.sequence];
    for (int64_t token = begin; token < end; token += kMlaBlock) {
      if (!AttendBlock(token, std::min(kMlaBlock, end - token), first_position + token - begin)) {
        break;
      }
    }
    StoreState();
  }

 private:
  // False if no row sees the block, nor then a later one.
  bool AttendBlock(int64_t first, int64_t num_keys, int64_t position) {
    int64_t most = 0;
    for (int64_t row = 0; row < rows_.rows; ++row) {
      const int64_t last = args_.positions[task_.first_token + row];
      const int64_t count = std::clamp<int64_t>(last + 1 - position, 0, num_keys);
      rows_.count[row] = static_cast<float>(count);
      most = std::max(most, count);
    }
    if (most == 0) return false;
    const int64_t rope_dim = args_.k_rope.cols, v_dim = args_.out.dim;
    const int64_t nope_dim = sizes_.key_dims - rope_dim;
    for (int64_t i = 0; i < most; ++i) {
      float* key = keys_ + i * sizes_.key_stride;
      const float* expanded = args_.expanded.At(first + i, head_);
      std::memcpy(key, expanded, nope_dim * sizeof(float));
      if (rope_dim > 0) {
        std::memcpy(key + nope_dim, args_.k_rope.Row<float>(first + i), rope_dim * sizeof(float));
      }
      std::memcpy(key + sizes_.key_dims, expanded + nope_dim, v_dim * sizeof(float));
    }
    const auto score = [&](int64_t panel, int64_t visible) HWY_ATTR {
      const float* q = queries_ + panel * kPanelRows * sizes_.key_dims;
      WithPanelVectors(rows_.PanelSize(panel), [&]<int V>(auto d) HWY_ATTR {
        ScorePanel<V>(d, q, keys_, sizes_.key_stride, sizes_.key_dims, visible, rows_.scores);
      });
    };
    const float* values[kMlaBlock];
    for (int64_t i = 0; i < most; ++i) values[i] = keys_ + i * sizes_.key_stride + sizes_.key_dims;
    FoldBlock(rows_, values, args_.scale, score, [] {});
    return true;
  }

  int64_t StateOf(int64_t row) const { return (task_.first_token + row) * args_.q.heads + head_; }

  void LoadState() {
    rows_.Clear();
    if (args_.first) return;
    for (int64_t row = 0; row < rows_.rows; ++row) {
      rows_.maximum[row] = args_.maximum[StateOf(row)];
      rows_.sum[row] = args_.sum[StateOf(row)];
      std::memcpy(rows_.out + row * sizes_.out_stride, args_.out.At(task_.first_token + row, head_),
                  args_.out.dim * sizeof(float));
    }
  }

  void StoreState() {
    for (int64_t row = 0; row < rows_.rows; ++row) {
      args_.maximum[StateOf(row)] = rows_.maximum[row];
      args_.sum[StateOf(row)] = rows_.sum[row];
      const float* from = rows_.out + row * sizes_.out_stride;
      float* out = args_.out.At(task_.first_token + row, head_);
      const float divisor = args_.last && rows_.sum[row] != 0.0f ? rows_.sum[row] : 1.0f;
      for (int64_t i = 0; i < args_.out.dim; ++i) out[i] = from[i] / divisor;
    }
  }

  const MlaPrefillArgs& args_;
  const PrefillSizes& sizes_;
  const PrefillTask& task_;
  const int64_t head_;
  float* queries_;
  float* keys_;  // [kMlaBlock, key_stride]: a key's nope part, its rotated part, its value
  TileRows rows_;
};

void RunPrefill(const MlaPrefillArgs& args, const PrefillSizes& sizes, const PrefillTask& task,
                int64_t head, float* memory) {
  PrefillRunner(args, sizes, task, head, memory).Run();
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
namespace {
HWY_EXPORT(RunPrefill);

// Rows of a task: as many as stay in the second-level cache, since each task copies the keys, but
// few enough to give every thread some tasks.
int64_t MaxRows(const MlaPrefillArgs& args, int num_threads) {
  constexpr int64_t kLeast = 32, kMost = 192, kTasksPerThread = 4;
  return std::clamp(args.q.tokens * args.q.heads / (num_threads * kTasksPerThread), kLeast, kMost);
}

// Reads the step's arrays, which must be in range and in order.
absl::StatusOr<std::vector<PrefillTask>> PlanPrefill(const MlaPrefillArgs& args, int64_t max_rows) {
  std::vector<PrefillTask> tasks;
  for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) {
    const auto error = [&](auto... what) {
      return absl::InvalidArgumentError(
          absl::StrCat("mla_prefill: sequence ", sequence, ": ", what...));
    };
    const int64_t begin = args.query_starts[sequence], end = args.query_starts[sequence + 1];
    if (begin < 0 || begin > end || end > args.q.tokens) {
      return error("tokens ", begin, " to ", end, " of ", args.q.tokens);
    }
    const int64_t key = args.segment_starts[sequence], key_end = args.segment_starts[sequence + 1];
    if (key < 0 || key > key_end || key_end > args.expanded.tokens) {
      return error("keys ", key, " to ", key_end, " of ", args.expanded.tokens);
    }
    const int64_t first_position = args.segment_first_positions[sequence];
    if (key < key_end && (first_position < 0 || first_position % kMlaPieceAlignment != 0)) {
      return error("its piece begins at position ", first_position, ", not at a multiple of ",
                   kMlaPieceAlignment);
    }
    const int64_t blocks = (end - begin + max_rows - 1) / max_rows;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t token = begin + i * (end - begin) / blocks;
      tasks.push_back({.sequence = sequence,
                       .first_token = token,
                       .num_tokens = begin + (i + 1) * (end - begin) / blocks - token});
    }
  }
  return tasks;
}

}  // namespace

absl::Status MlaPrefillCpu(const MlaPrefillArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateMlaPrefill(args));
  if (args.q.tokens == 0 || args.q.heads == 0) return absl::OkStatus();
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    const PrefillSizes sizes(args, MaxRows(args, pool.num_threads()));
    ASSIGN_OR_RETURN(const std::vector<PrefillTask> tasks, PlanPrefill(args, sizes.max_rows));
    auto* memory = reinterpret_cast<float*>(
        pool.Scratch(pool.num_threads() * sizes.per_thread * sizeof(float)));
    const auto run = HWY_DYNAMIC_DISPATCH(RunPrefill);
    std::atomic<int64_t> next_task{0};
    const auto num_tasks = static_cast<int64_t>(tasks.size()) * args.q.heads;
    pool.ParallelRun([&](int thread) {
      for (int64_t i; (i = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        // The last tokens see most: they come first, so that no thread is left with them.
        const PrefillTask& task = tasks[tasks.size() - 1 - i / args.q.heads];
        run(args, sizes, task, i % args.q.heads, memory + thread * sizes.per_thread);
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
