// Per context token and row (a query token's head): kv_lora_rank + rope_dim multiply-adds for the
// score, kv_lora_rank for the output, an exponential; per context token and sequence, one read of
// kv_lora_rank + rope_dim stored elements. From some ten heads on that is bound by arithmetic. So
// the tokens of a block are read by all rows for both products while the next block is fetched:
// where they lie if they are floats and fill vectors, else widened once into scratch.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/attention_plan.h"
#include "kernels/attention/mla_tile.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/mla_decode_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/attention/mla_row_scores-inl.h"
#include "kernels/attention/mla_tile-inl.h"

#ifndef HEDDLE_KERNELS_ATTENTION_MLA_DECODE_CPU_ONCE_
#define HEDDLE_KERNELS_ATTENTION_MLA_DECODE_CPU_ONCE_
namespace heddle {

// The working memory of a thread, in floats, and the form of a chunk's result in memory.
struct MlaSizes {
  MlaSizes(const MlaDecodeArgs& args, const AttentionPlan& plan)
      : group(plan.group_heads),
        latent_dims(MlaTile::WholeVectors(args.kv.kv_lora_rank)),
        rope_dims(MlaTile::WholeVectors(args.kv.rope_dim)),
        out_stride(latent_dims),
        key_stride(MlaTile::KeyStride(latent_dims + rope_dims)),
        padded_rows(MlaTile::PaddedRows(plan.max_rows)),
        queries(plan.max_rows * key_stride),
        keys(kMlaBlock * key_stride),
        state(plan.max_rows * out_stride),
        per_thread(queries + keys + MlaTile::Scores() + 2 * state + 6 * padded_rows) {}

  // A row of a chunk's result: output, maximum, sum.
  int64_t partial_stride() const { return out_stride + 2; }

  int64_t group;        // heads of a task
  int64_t latent_dims;  // whole vectors, as are the following
  int64_t rope_dims;
  int64_t out_stride;
  int64_t key_stride;
  int64_t padded_rows;
  int64_t queries;
  int64_t keys;
  int64_t state;
  int64_t per_thread;
};

}  // namespace heddle
#endif  // HEDDLE_KERNELS_ATTENTION_MLA_DECODE_CPU_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE TileVec LoadWide(const float* from) { return hn::LoadU(TileTag(), from); }

HWY_INLINE TileVec LoadWide(const hwy::bfloat16_t* from) {
  const hn::Rebind<uint16_t, TileTag> d16;
  const hn::Rebind<uint32_t, TileTag> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(TileTag(), hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

HWY_INLINE TileVec LoadWide(const hwy::float16_t* from) {
  return hn::PromoteTo(TileTag(), hn::LoadU(hn::Rebind<hwy::float16_t, TileTag>(), from));
}

// Writes `padded` floats, whole vectors: `count` stored elements and then zeros. It reads no more
// than there are, since what follows may be another page, or the end of the pool.
template <typename T>
void WidenRow(const std::byte* stored, int64_t count, int64_t padded, float* HWY_RESTRICT to) {
  const T* HWY_RESTRICT from = reinterpret_cast<const T*>(stored);
  int64_t i = 0;
  for (; i + kTileLanes <= count; i += kTileLanes) hn::Store(LoadWide(from + i), TileTag(), to + i);
  if (i < count) {
    T rest[kTileLanes] = {};
    std::memcpy(rest, from + i, (count - i) * sizeof(T));
    hn::Store(LoadWide(rest), TileTag(), to + i);
    i += kTileLanes;
  }
  std::fill(to + i, to + padded, 0.0f);
}

void WidenRow(DType dtype, const std::byte* stored, int64_t count, int64_t padded, float* to) {
  switch (dtype) {
    case DType::kBFloat16:
      return WidenRow<hwy::bfloat16_t>(stored, count, padded, to);
    case DType::kFloat16:
      return WidenRow<hwy::float16_t>(stored, count, padded, to);
    default:
      return WidenRow<float>(stored, count, padded, to);
  }
}

// The stored tokens of a block, in order of their positions.
struct LatentBlock {
  int64_t count = 0;
  int32_t positions[kMlaBlock];
  const std::byte* latent[kMlaBlock];
  const std::byte* rope[kMlaBlock];
};

// Finds the blocks of one sequence in its pages; they are asked for in ascending order.
class BlockReader {
 public:
  BlockReader(const PagedLatentView& kv, const AttentionTask& task)
      : kv_(kv),
        latent_bytes_(BlockBytes(kv.latent.dtype)),
        rope_bytes_(BlockBytes(kv.rope.dtype)),
        page_(kv.pages + kv.page_starts[task.sequence]),
        end_(kv.pages + kv.page_starts[task.sequence + 1]) {
    // The first page that ends behind the task's first position.
    const int64_t first = task.first_chunk * kMlaChunk;
    page_ = std::partition_point(page_, end_, [first](const PageSpan& page) {
      return int64_t{page.first_position} + page.num_valid <= first;
    });
  }

  void Read(int64_t index, LatentBlock& block) {
    const int64_t first = index * kMlaBlock, end = first + kMlaBlock;
    block.count = 0;
    for (; page_ < end_; ++page_) {
      const int64_t page_first = page_->first_position;
      const int64_t page_end = page_first + page_->num_valid;
      for (int64_t p = std::max(first, page_first); p < std::min(end, page_end); ++p) {
        Add(page_->slot, p - page_first, p, block);
      }
      if (page_end >= end) break;  // The next block may go on in this page.
    }
  }

 private:
  void Add(int64_t slot, int64_t offset, int64_t position, LatentBlock& block) {
    const auto at = [slot, offset](const auto& part, int64_t dims, int64_t bytes) {
      return static_cast<const std::byte*>(part.data) +
             (slot * part.slot_stride + offset * dims) * bytes;
    };
    block.positions[block.count] = static_cast<int32_t>(position);
    block.latent[block.count] = at(kv_.latent, kv_.kv_lora_rank, latent_bytes_);
    block.rope[block.count++] = at(kv_.rope, kv_.rope_dim, rope_bytes_);
  }

  const PagedLatentView& kv_;
  const int64_t latent_bytes_;  // of an element
  const int64_t rope_bytes_;
  const PageSpan* page_;
  const PageSpan* const end_;
};

// Folds a row's (output, maximum, sum) of a later chunk into `into`. A sum of 0 has seen nothing.
HWY_INLINE void FoldRow(const float* HWY_RESTRICT from, float from_maximum, float from_sum,
                        int64_t dims, float* HWY_RESTRICT into, float& maximum, float& sum) {
  const TileTag d;
  if (from_sum == 0.0f) return;
  if (sum == 0.0f) {
    std::memcpy(into, from, dims * sizeof(float));
    maximum = from_maximum;
    sum = from_sum;
    return;
  }
  const float larger = std::max(maximum, from_maximum);
  const auto into_scale = ExpUpTo88(d, hn::Set(d, maximum - larger));
  const auto from_scale = ExpUpTo88(d, hn::Set(d, from_maximum - larger));
  for (int64_t i = 0; i < dims; i += kTileLanes) {
    const auto scaled = hn::Mul(hn::LoadU(d, into + i), into_scale);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, from + i), from_scale, scaled), d, into + i);
  }
  maximum = larger;
  sum = hn::GetLane(
      hn::MulAdd(hn::Set(d, from_sum), from_scale, hn::Mul(hn::Set(d, sum), into_scale)));
}

// Writes the output of a row of a task.
HWY_INLINE void WriteRow(const MlaDecodeArgs& args, int64_t token, int64_t head, const float* out,
                         float maximum, float sum) {
  const float divisor = sum == 0.0f ? 1.0f : sum;  // of a row that saw nothing: zeros
  float* target = args.out.At(token, head);
  for (int64_t i = 0; i < args.out.dim; ++i) target[i] = out[i] / divisor;
  if (args.log_sum_exp != nullptr) {
    args.log_sum_exp[head * args.out.tokens + token] = maximum + std::log(divisor);
  }
}

// Asks for a block while another is worked off: a little before each tile, since a core can wait
// for but a dozen lines at a time, for which all else that is not in the first-level cache waits
// too.
class BlockPrefetch {
 public:
  BlockPrefetch(const PagedLatentView& kv, const LatentBlock& block)
      : block_(block),
        bytes_{kv.kv_lora_rank * BlockBytes(kv.latent.dtype),
               kv.rope_dim * BlockBytes(kv.rope.dtype)} {}

  HWY_INLINE void AskForMore() {
    for (int i = 0; i < kAtOnce && row_ < block_.count; ++i) {
      __builtin_prefetch((part_ == 0 ? block_.latent : block_.rope)[row_] + byte_, 0, 2);
      byte_ += kPairOfLines;
      if (byte_ < bytes_[part_]) continue;
      byte_ = 0;
      part_ = 1 - part_;
      if (part_ == 0) ++row_;
    }
  }

 private:
  static constexpr int kAtOnce = 8;
  static constexpr int64_t kPairOfLines = 128;  // processors fetch the other one by themselves

  const LatentBlock& block_;
  const int64_t bytes_[2];  // of a token's parts
  int64_t row_ = 0;
  int part_ = 0;
  int64_t byte_ = 0;
};

class TaskRunner {
 public:
  TaskRunner(const MlaDecodeArgs& args, const MlaSizes& sizes, const AttentionTask& task,
             float* memory)
      : args_(args), sizes_(sizes), task_(task), in_place_(CanReadInPlace(args, sizes)) {
    const int64_t rows = task.num_tokens * sizes.group;
    queries_ = memory;
    keys_ = queries_ + sizes.queries;
    float* scores = keys_ + sizes.keys;
    float* outs = scores + MlaTile::Scores();
    float* figures = outs + 2 * sizes.state;
    for (TileRows* state : {&chunk_, &total_}) {
      *state = {.rows = rows,
                .value_dims = sizes.latent_dims,
                .out_stride = sizes.out_stride,
                .scores = scores,
                .count = figures,
                .maximum = figures + (state == &chunk_ ? 1 : 2) * sizes.padded_rows,
                .sum = figures + (state == &chunk_ ? 3 : 4) * sizes.padded_rows,
                .factor = figures + 5 * sizes.padded_rows,
                .out = outs + (state == &chunk_ ? 0 : sizes.state)};
    }
    std::fill_n(figures, sizes.padded_rows, 0.0f);  // rows past the end see nothing
  }

  void Run(float* partials) {
    CopyQueries();
    BlockReader reader(args_.kv, task_);
    constexpr int64_t kChunkBlocks = kMlaChunk / kMlaBlock;
    const int64_t first_block = task_.first_chunk * kChunkBlocks;
    const int64_t end_block = task_.end_chunk * kChunkBlocks;
    LatentBlock blocks[2];
    total_.Clear();
    chunk_.Clear();
    if (first_block < end_block) reader.Read(first_block, blocks[first_block % 2]);
    for (int64_t index = first_block; index < end_block; ++index) {
      LatentBlock& next = blocks[(index + 1) % 2];
      next.count = 0;
      if (index + 1 < end_block) reader.Read(index + 1, next);
      AttendBlock(blocks[index % 2], next);
      if ((index + 1) % kChunkBlocks == 0) {
        EndChunk(index / kChunkBlocks, partials);
        chunk_.Clear();
      }
    }
    if (task_.partial_row >= 0) return;
    for (int64_t row = 0; row < total_.rows; ++row) {
      WriteRow(args_, TokenOf(row), HeadOf(row), total_.out + row * sizes_.out_stride,
               total_.maximum[row], total_.sum[row]);
    }
  }

 private:
  int64_t TokenOf(int64_t row) const { return task_.first_token + row / sizes_.group; }
  int64_t HeadOf(int64_t row) const { return task_.group * sizes_.group + row % sizes_.group; }

  // Whether stored tokens are rows of floats as the kernel reads them.
  static bool CanReadInPlace(const MlaDecodeArgs& args, const MlaSizes& sizes) {
    const PagedLatentView& kv = args.kv;
    return kv.latent.dtype == DType::kFloat32 && kv.rope.dtype == DType::kFloat32 &&
           kv.kv_lora_rank == sizes.latent_dims && kv.rope_dim == sizes.rope_dims;
  }

  void CopyQueries() {
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const auto* latent = args_.q_latent.At(TokenOf(row), HeadOf(row));
      const auto* rope = args_.q_rope.At(TokenOf(row), HeadOf(row));
      CopyRow(DType::kFloat32, reinterpret_cast<const std::byte*>(latent), DType::kFloat32,
              reinterpret_cast<const std::byte*>(rope), queries_ + row * sizes_.key_stride);
    }
  }

  // Both parts, each with zeros behind it up to a whole vector.
  void CopyRow(DType latent_dtype, const std::byte* latent, DType rope_dtype, const std::byte* rope,
               float* row) const {
    WidenRow(latent_dtype, latent, args_.kv.kv_lora_rank, sizes_.latent_dims, row);
    WidenRow(rope_dtype, rope, args_.kv.rope_dim, sizes_.rope_dims, row + sizes_.latent_dims);
  }

  void AttendBlock(const LatentBlock& block, const LatentBlock& next) {
    if (block.count == 0) return;
    const float* latent[kMlaBlock];
    const float* rope[kMlaBlock];
    for (int64_t i = 0; i < block.count; ++i) {
      if (in_place_) {
        latent[i] = reinterpret_cast<const float*>(block.latent[i]);
        rope[i] = reinterpret_cast<const float*>(block.rope[i]);
        continue;
      }
      float* key = keys_ + i * sizes_.key_stride;
      CopyRow(args_.kv.latent.dtype, block.latent[i], args_.kv.rope.dtype, block.rope[i], key);
      latent[i] = key;
      rope[i] = key + sizes_.latent_dims;
    }
    for (int64_t row = 0; row < chunk_.rows; row += sizes_.group) {
      const int32_t* end = block.positions + block.count;
      const auto seen =
          std::upper_bound(block.positions, end, args_.positions[TokenOf(row)]) - block.positions;
      std::fill_n(chunk_.count + row, sizes_.group, static_cast<float>(seen));
    }
    BlockPrefetch prefetch(args_.kv, next);
    const auto ask = [&] { prefetch.AskForMore(); };
    const KeyRows keys = {.part = {latent, rope}, .dims = {sizes_.latent_dims, sizes_.rope_dims}};
    const auto score = [&](int64_t panel, int64_t visible) HWY_ATTR {
      ScoreRows(queries_ + panel * kPanelRows * sizes_.key_stride, chunk_.PanelSize(panel),
                sizes_.key_stride, keys, visible, chunk_.scores, ask);
    };
    FoldBlock(chunk_, latent, args_.scale, score, ask);
  }

  void EndChunk(int64_t chunk, float* partials) {
    float* partial = partials + (task_.partial_row + (chunk - task_.first_chunk) * chunk_.rows) *
                                    sizes_.partial_stride();
    for (int64_t row = 0; row < chunk_.rows; ++row) {
      const float* out = chunk_.out + row * sizes_.out_stride;
      if (task_.partial_row < 0) {
        FoldRow(out, chunk_.maximum[row], chunk_.sum[row], sizes_.out_stride,
                total_.out + row * sizes_.out_stride, total_.maximum[row], total_.sum[row]);
        continue;
      }
      float* target = partial + row * sizes_.partial_stride();
      std::memcpy(target, out, sizes_.out_stride * sizeof(float));
      target[sizes_.out_stride] = chunk_.maximum[row];
      target[sizes_.out_stride + 1] = chunk_.sum[row];
    }
  }

  const MlaDecodeArgs& args_;
  const MlaSizes& sizes_;
  const AttentionTask& task_;
  const bool in_place_;
  float* queries_;
  float* keys_;  // [kMlaBlock, key_stride]: a block's latents, then rotated keys
  TileRows chunk_;
  TileRows total_;
};

void RunTask(const MlaDecodeArgs& args, const MlaSizes& sizes, const AttentionTask& task,
             float* partials, float* memory) {
  TaskRunner(args, sizes, task, memory).Run(partials);
}

// Row `row` of rows whose context was split.
void RunMerge(const MlaDecodeArgs& args, const MlaSizes& sizes, const AttentionMerge& merge,
              int64_t row, float* partials) {
  const int64_t rows = merge.num_tokens * sizes.group;
  const int64_t stride = sizes.partial_stride();
  float* total = partials + (merge.partial_row + row) * stride;
  float* figures = total + sizes.out_stride;
  for (int64_t chunk = 1; chunk < merge.num_chunks; ++chunk) {
    const float* from = total + chunk * rows * stride;
    FoldRow(from, from[sizes.out_stride], from[sizes.out_stride + 1], sizes.out_stride, total,
            figures[0], figures[1]);
  }
  WriteRow(args, merge.first_token + row / sizes.group,
           merge.group * sizes.group + row % sizes.group, total, figures[0], figures[1]);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
namespace {
HWY_EXPORT(RunTask);
HWY_EXPORT(RunMerge);

// Rows that share a widened block; more keep no more of it near.
constexpr int64_t kMaxRows = 128;
// Heads of a group beside whose arithmetic it is little to widen a block for each group, and which
// at least fill vectors.
constexpr int64_t kAmpleGroup = 32, kLeastGroup = 8;

// The smallest number of groups of at least `least` heads that makes enough of `num_tasks` tasks,
// or else the largest.
int64_t NumGroups(int64_t heads, int64_t least, int64_t num_tasks, int64_t wanted) {
  int64_t num_groups = 1;
  for (int64_t n = 1; heads / n >= least && num_tasks * num_groups < wanted; ++n) {
    if (heads % n == 0) num_groups = n;
  }
  return num_groups;
}

// All heads of a sequence in one task if that gives the threads enough to do. Else heads are put in
// ample groups, then contexts are cut, whose chunks then go through memory, then groups get small.
absl::StatusOr<AttentionPlan> Plan(const MlaDecodeArgs& args, int num_threads) {
  const int64_t heads = args.q_latent.heads;
  AttentionWork work = {.op = "mla_decode",
                        .num_tokens = args.q_latent.tokens,
                        .num_sequences = args.num_sequences,
                        .query_starts = args.query_starts,
                        .positions = args.positions,
                        .page_size = args.kv.page_size,
                        .page_starts = args.kv.page_starts,
                        .pages = args.kv.pages,
                        .chunk = kMlaChunk,
                        .num_groups = 1,
                        .group_heads = heads,
                        .max_rows = kMaxRows,
                        .tasks_before_splits = 2};
  const int64_t wanted = num_threads == 1 ? 1 : 2 * num_threads;
  ASSIGN_OR_RETURN(AttentionPlan plan, PlanAttention(work, num_threads));
  for (const int64_t least : {kAmpleGroup, kLeastGroup}) {
    const int64_t num_tasks =
        least == kAmpleGroup ? plan.num_whole_tasks : static_cast<int64_t>(plan.tasks.size());
    const int64_t factor = NumGroups(work.group_heads, least, num_tasks, wanted);
    if (factor == 1) continue;
    work.num_groups *= factor;
    work.group_heads /= factor;
    ASSIGN_OR_RETURN(plan, PlanAttention(work, num_threads));
  }
  return plan;
}

}  // namespace

absl::Status MlaDecodeCpu(const MlaDecodeArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateMlaDecode(args));
  if (args.q_latent.tokens == 0 || args.q_latent.heads == 0) return absl::OkStatus();
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    ASSIGN_OR_RETURN(const AttentionPlan plan, Plan(args, pool.num_threads()));
    const MlaSizes sizes(args, plan);
    const int64_t thread_floats = pool.num_threads() * sizes.per_thread;
    float* memory = reinterpret_cast<float*>(pool.Scratch(
        (thread_floats + plan.num_partial_rows * sizes.partial_stride()) * sizeof(float)));
    float* partials = memory + thread_floats;

    const auto run_task = HWY_DYNAMIC_DISPATCH(RunTask);
    std::atomic<int64_t> next_task{0};
    const auto num_tasks = static_cast<int64_t>(plan.tasks.size());
    pool.ParallelRun([&](int thread) {
      for (int64_t i; (i = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        run_task(args, sizes, plan.tasks[i], partials, memory + thread * sizes.per_thread);
      }
    });
    const auto run_merge = HWY_DYNAMIC_DISPATCH(RunMerge);
    for (const AttentionMerge& merge : plan.merges) {
      pool.ParallelFor(merge.num_tokens * sizes.group,
                       [&](int64_t row) { run_merge(args, sizes, merge, row, partials); });
    }
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
