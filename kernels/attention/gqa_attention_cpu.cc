// Per KV head and context token, with G query heads a KV head and T query tokens in a block: reads
// 2 * head_dim elements of K and V once, computes G * T * 2 * head_dim multiply-adds and G * T
// exponentials. Decode (T = 1) is bound by memory for G up to about 8, so K and V are read where
// they lie and widened in registers, all heads of a block of tokens after each other, as that is
// one run of memory, and the next head's are prefetched while one's are computed. Prefill is bound
// by arithmetic: tiles of rows keep R x V sums in registers, and all tiles pass over a block of K
// or V before the next block is touched.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/attention_plan.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/gqa_attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/gqa_chunk_reader-inl.h"
#include "kernels/cpu/exp-inl.h"

#ifndef HEDDLE_KERNELS_ATTENTION_GQA_ATTENTION_CPU_ONCE_
#define HEDDLE_KERNELS_ATTENTION_GQA_ATTENTION_CPU_ONCE_
namespace heddle {

// The working memory of a call, in floats.
struct GqaSizes {
  static constexpr int64_t kMaxLanes = kMaxAttentionLanes;
  static constexpr int64_t kTileRows = 4;
  // Scores of a row: a chunk, and room for a vector that begins at its last token.
  static constexpr int64_t kScoreStride = kAttentionChunk + kMaxLanes;

  GqaSizes(const GqaAttentionArgs& args, int64_t kv_heads_of_task, int64_t max_rows)
      : num_heads(kv_heads_of_task),
        group(args.num_query_heads / args.kv.num_kv_heads),
        head_dim(args.kv.head_dim),
        padded_dim((head_dim + kMaxLanes - 1) / kMaxLanes * kMaxLanes),
        state_stride(padded_dim + kMaxLanes),
        query(Aligned(max_rows * head_dim)),
        scores(Aligned(max_rows * kScoreStride)),
        states(Aligned(max_rows * state_stride)),
        packed_keys(Aligned(kAttentionChunk * head_dim + kMaxLanes)),
        masks(Aligned(max_rows * kChunkBlocks * 2)),
        per_thread(query + scores + 2 * states + 2 * packed_keys + masks) {}

  static int64_t Aligned(int64_t floats) { return (floats + 31) / 32 * 32; }

  int64_t num_heads;  // KV heads of a task; its rows are (KV head, token, query head of the group)
  int64_t group;
  int64_t head_dim;
  int64_t padded_dim;
  int64_t state_stride;  // output [padded_dim], maximum, sum
  int64_t query;
  int64_t scores;
  int64_t states;
  int64_t packed_keys;  // of a chunk
  int64_t masks;
  int64_t per_thread;
};

}  // namespace heddle
#endif  // HEDDLE_KERNELS_ATTENTION_GQA_ATTENTION_CPU_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kTileRows = GqaSizes::kTileRows;
constexpr int64_t kScoreStride = GqaSizes::kScoreStride;

// Vectors that a tile of R rows keeps per row: as many sums as registers hold, and with few rows
// enough of them to hide the latency of a multiply-add.
template <int R>
constexpr int TileVectors() {
  return kLanes == 16 || R <= 2 ? 4 : 2;
}

// Into the second-level cache: the first holds what is being computed.
HWY_INLINE void PrefetchFar(const void* address) { __builtin_prefetch(address, 0, 2); }

// scores[r][token] = q[r] . k[token] for V vectors of tokens, from the block's i-th on. Prefetches
// the same ones of `next` unless it is null.
template <int R, int V, typename TK, typename TV>
HWY_INLINE void ScoreVectors(const float* HWY_RESTRICT q, int64_t head_dim,
                             const HeadBlock<TK, TV>& now, const HeadBlock<TK, TV>* next, int64_t i,
                             float* HWY_RESTRICT scores) {
  const FloatTag d;
  const int64_t stride = now.block->k_stride;
  const int64_t next_stride = next != nullptr ? next->block->k_stride : 0;
  FloatVec sums[R][V];
  const TK* keys[V];
  const TK* next_keys[V];
  for (int v = 0; v < V; ++v) {
    keys[v] = now.block->k[i + v] + now.k_offset;
    next_keys[v] = next != nullptr ? next->block->k[i + v] + next->k_offset : nullptr;
    for (int r = 0; r < R; ++r) sums[r][v] = hn::Zero(d);
  }
  for (int64_t dim = 0; dim < head_dim; ++dim) {
    FloatVec key[V];
    for (int v = 0; v < V; ++v) {
      key[v] = LoadWide(keys[v] + dim * stride);
      if (next != nullptr) PrefetchFar(next_keys[v] + dim * next_stride);
    }
    for (int r = 0; r < R; ++r) {
      const auto query = hn::Set(d, q[dim * R + r]);
      for (int v = 0; v < V; ++v) sums[r][v] = hn::MulAdd(query, key[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      hn::StoreU(sums[r][v], d, scores + r * kScoreStride + now.block->k_token[i + v]);
    }
  }
}

// Scores of R rows and the tokens of a block; of the vectors that hold none of `visible`, nothing.
template <int R, typename TK, typename TV>
void ScoreBlock(const float* q, int64_t head_dim, uint64_t visible, const HeadBlock<TK, TV>& now,
                const HeadBlock<TK, TV>* next, float* scores) {
  constexpr int kVectors = TileVectors<R>();
  const Block<TK, TV>& block = *now.block;
  const int last_token = 63 - std::countl_zero(visible);
  int64_t i = 0;
  for (; i + kVectors <= block.num_vectors && block.k_token[i] <= last_token; i += kVectors) {
    // The next block's vectors as far as there are places for them.
    const bool prefetch = i + kVectors <= kBlock / kLanes;
    ScoreVectors<R, kVectors>(q, head_dim, now, prefetch ? next : nullptr, i, scores);
  }
  for (; i < block.num_vectors && block.k_token[i] <= last_token; ++i) {
    ScoreVectors<R, 1, TK, TV>(q, head_dim, now, nullptr, i, scores);
  }
}

// Turns the scores of the tokens that a row sees into weights exp(score * scale - maximum), those
// of its other tokens into 0, whatever they were.
HWY_INLINE void Softmax(const uint64_t* masks, float scale, float* HWY_RESTRICT scores,
                        float& maximum, float& sum) {
  const FloatTag d;
  const auto scales = hn::Set(d, scale);
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto maxima = lowest;
  for (int64_t b = 0; b < kChunkBlocks; ++b) {
    if (masks[b] == 0) continue;
    for (int64_t t = 0; t < kBlock; t += kLanes) {
      const uint64_t bits = masks[b] >> t;
      const auto mask = hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits));
      const auto score = hn::Mul(hn::LoadU(d, scores + b * kBlock + t), scales);
      maxima = hn::Max(hn::IfThenElse(mask, score, lowest), maxima);
    }
  }
  const auto max = hn::MaxOfLanes(d, maxima);
  auto sums = hn::Zero(d);
  for (int64_t b = 0; b < kChunkBlocks; ++b) {
    if (masks[b] == 0) continue;
    for (int64_t t = 0; t < kBlock; t += kLanes) {
      const uint64_t bits = masks[b] >> t;
      const auto mask = hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits));
      const auto score = hn::LoadU(d, scores + b * kBlock + t);
      const auto weight = hn::IfThenElseZero(mask, ExpUpTo88(d, hn::MulSub(score, scales, max)));
      hn::StoreU(weight, d, scores + b * kBlock + t);
      sums = hn::Add(sums, weight);
    }
  }
  maximum = hn::GetLane(max);
  sum = hn::GetLane(hn::SumOfLanes(d, sums));
}

// states[r] += weights[r] . v over tokens [begin, end), for V vectors of dimensions from `dim` on.
template <int R, int V, typename TK, typename TV>
HWY_INLINE void AccumulateVectors(const float* HWY_RESTRICT weights, const HeadBlock<TK, TV>& now,
                                  const HeadBlock<TK, TV>* next, int64_t begin, int64_t end,
                                  int64_t dim, float* HWY_RESTRICT states, int64_t state_stride) {
  const FloatTag d;
  const TV* const* values = now.block->v;
  const TV* const* next_values = next != nullptr ? next->block->v : nullptr;
  const int64_t offset = now.v_offset + dim;
  const int64_t next_offset = next != nullptr ? next->v_offset + dim : 0;
  FloatVec sums[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      sums[r][v] = hn::LoadU(d, states + r * state_stride + dim + v * kLanes);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    FloatVec value[V];
    for (int v = 0; v < V; ++v) {
      value[v] = LoadWide(values[t] + offset + v * kLanes);
      if (next_values != nullptr) PrefetchFar(next_values[t] + next_offset + v * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const auto weight = hn::Set(d, weights[r * kScoreStride + t]);
      for (int v = 0; v < V; ++v) sums[r][v] = hn::MulAdd(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      hn::StoreU(sums[r][v], d, states + r * state_stride + dim + v * kLanes);
    }
  }
}

// The same for all dimensions and the tokens of `mask`, in order.
template <int R, typename TK, typename TV>
void Accumulate(uint64_t mask, const float* weights, const HeadBlock<TK, TV>& now,
                const HeadBlock<TK, TV>* next, const GqaSizes& sizes, float* states) {
  constexpr int kVectors = TileVectors<R>();
  while (mask != 0) {
    const int begin = std::countr_zero(mask);
    const int end = begin + std::countr_one(mask >> begin);
    mask &= end == kBlock ? 0 : ~uint64_t{0} << end;
    int64_t dim = 0;
    for (; dim + kVectors * kLanes <= sizes.padded_dim; dim += kVectors * kLanes) {
      AccumulateVectors<R, kVectors>(weights, now, next, begin, end, dim, states,
                                     sizes.state_stride);
    }
    for (; dim < sizes.head_dim; dim += kLanes) {
      AccumulateVectors<R, 1>(weights, now, next, begin, end, dim, states, sizes.state_stride);
    }
  }
}

// Adds the values of a block, weighted, to the states of R rows; row r sees the tokens of masks[r *
// kChunkBlocks]. Tokens that only some rows see lie before those that all see (windows) or behind
// them (causality); each row takes its tokens in order.
template <int R, typename TK, typename TV>
void AccumulateBlock(const uint64_t* masks, const float* weights, const HeadBlock<TK, TV>& now,
                     const HeadBlock<TK, TV>* next, const GqaSizes& sizes, float* states) {
  uint64_t all = ~uint64_t{0};
  for (int r = 0; r < R; ++r) all &= masks[r * kChunkBlocks];
  const uint64_t before = all == 0 ? ~uint64_t{0} : (all & -all) - 1;
  const auto add_some = [&](uint64_t tokens) HWY_ATTR {
    for (int r = 0; r < R; ++r) {
      Accumulate<1, TK, TV>(masks[r * kChunkBlocks] & tokens, weights + r * kScoreStride, now,
                            nullptr, sizes, states + r * sizes.state_stride);
    }
  };
  if constexpr (R > 1) add_some(before & ~all);
  Accumulate<R>(all, weights, now, next, sizes, states);
  if constexpr (R > 1) add_some(~before & ~all);
}

// Folds `from`, later in position, into `into`. A state whose sum is 0 has seen nothing.
HWY_INLINE void Fold(const float* HWY_RESTRICT from, int64_t padded_dim, float* HWY_RESTRICT into) {
  const FloatTag d;
  float* into_stats = into + padded_dim;
  const float* from_stats = from + padded_dim;
  if (from_stats[1] == 0.0f) return;
  if (into_stats[1] == 0.0f) {
    std::memcpy(into, from, (padded_dim + 2) * sizeof(float));
    return;
  }
  const float maximum = std::max(into_stats[0], from_stats[0]);
  const auto into_scale = ExpUpTo88(d, hn::Set(d, into_stats[0] - maximum));
  const auto from_scale = ExpUpTo88(d, hn::Set(d, from_stats[0] - maximum));
  for (int64_t dim = 0; dim < padded_dim; dim += kLanes) {
    const auto scaled = hn::Mul(hn::LoadU(d, into + dim), into_scale);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, from + dim), from_scale, scaled), d, into + dim);
  }
  into_stats[0] = maximum;
  into_stats[1] = hn::GetLane(hn::MulAdd(hn::Set(d, from_stats[1]), from_scale,
                                         hn::Mul(hn::Set(d, into_stats[1]), into_scale)));
}

// The working memory of one thread.
struct Scratch {
  Scratch(float* base, const GqaSizes& sizes)
      : query(base),
        scores(query + sizes.query),
        chunk_states(scores + sizes.scores),
        total_states(chunk_states + sizes.states),
        packed_keys(total_states + sizes.states),
        masks(reinterpret_cast<uint64_t*>(packed_keys + 2 * sizes.packed_keys)) {}

  float* query;   // each tile of a head [head_dim, rows of the tile]
  float* scores;  // [rows, kScoreStride]
  float* chunk_states;
  float* total_states;
  float* packed_keys;  // [2 chunks, kChunkBlocks, head_dim, kBlock]
  uint64_t* masks;     // [rows of a head, kChunkBlocks]: the tokens that a row sees
};

void ClearStates(const GqaSizes& sizes, int64_t rows, float* states) {
  for (int64_t row = 0; row < rows; ++row) {
    float* state = states + row * sizes.state_stride;
    std::memset(state, 0, sizes.state_stride * sizeof(float));
    state[sizes.padded_dim] = -std::numeric_limits<float>::infinity();
  }
}

// Divides the rows' outputs by their sums.
void WriteOutput(const GqaAttentionArgs& args, const GqaSizes& sizes, int64_t first_token,
                 int64_t num_tokens, int64_t kv_head, const float* states) {
  for (int64_t row = 0; row < num_tokens * sizes.group; ++row) {
    const float* state = states + row * sizes.state_stride;
    const int64_t token = first_token + row / sizes.group;
    const int64_t head = kv_head * sizes.group + row % sizes.group;
    float* out = args.out.Row<float>(token) + head * sizes.head_dim;
    const float sum = state[sizes.padded_dim + 1];
    const float divisor = sum == 0.0f ? 1.0f : sum;  // of a row that saw nothing: zeros
    for (int64_t dim = 0; dim < sizes.head_dim; ++dim) out[dim] = state[dim] / divisor;
    if (args.log_sum_exp != nullptr) {
      args.log_sum_exp[token * args.num_query_heads + head] =
          state[sizes.padded_dim] + std::log(divisor);
    }
  }
}

// Rows of a head in tile t of n: [rows * t / n, rows * (t + 1) / n).
struct Tiling {
  explicit Tiling(int64_t num_rows)
      : rows(num_rows), num_tiles((num_rows + kTileRows - 1) / kTileRows) {}
  int64_t Begin(int64_t tile) const { return rows * tile / num_tiles; }
  int64_t rows;
  int64_t num_tiles;
};

void PackQueries(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionTask& task,
                 int64_t kv_head, const Tiling& tiling, float* packed) {
  for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
    const int64_t begin = tiling.Begin(tile), tile_rows = tiling.Begin(tile + 1) - begin;
    float* target = packed + begin * sizes.head_dim;
    for (int64_t r = 0; r < tile_rows; ++r) {
      const int64_t row = begin + r;
      const float* q = args.q.Row<float>(task.first_token + row / sizes.group) +
                       (kv_head * sizes.group + row % sizes.group) * sizes.head_dim;
      for (int64_t dim = 0; dim < sizes.head_dim; ++dim) target[dim * tile_rows + r] = q[dim];
    }
  }
}

// Bits of a block's tokens that a query at `position` may see.
uint64_t VisibleBits(int64_t position, int64_t window, int64_t block_first) {
  const int64_t end = std::min(position + 1 - block_first, kBlock);
  const int64_t begin = window > 0 ? std::max<int64_t>(position + 1 - window - block_first, 0) : 0;
  if (begin >= end) return 0;
  return (~uint64_t{0} >> (kBlock - (end - begin))) << begin;
}

// One task; K and V are T.
template <typename T, bool kPacked>
class TaskRunner {
 public:
  TaskRunner(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionTask& task,
             float* thread_memory)
      : args_(args),
        sizes_(sizes),
        task_(task),
        scratch_(thread_memory, sizes),
        tiling_(task.num_tokens * sizes.group),
        num_rows_(tiling_.rows * sizes.num_heads),
        first_head_(task.group * sizes.num_heads) {}

  void Run(float* partials) {
    for (int64_t head = 0; head < sizes_.num_heads; ++head) {
      PackQueries(args_, sizes_, task_, first_head_ + head, tiling_,
                  scratch_.query + head * tiling_.rows * sizes_.head_dim);
    }
    Reader reader(args_.kv, task_, first_head_, scratch_.packed_keys, sizes_.packed_keys);
    ChunkT chunks[2];
    ClearStates(sizes_, num_rows_, scratch_.total_states);
    if (task_.first_chunk < task_.end_chunk) reader.Read(task_.first_chunk, chunks[0]);
    for (int64_t index = task_.first_chunk; index < task_.end_chunk; ++index) {
      const ChunkT& chunk = chunks[(index - task_.first_chunk) % 2];
      ChunkT* next = nullptr;
      if (index + 1 < task_.end_chunk) {
        next = &chunks[(index - task_.first_chunk + 1) % 2];
        reader.Read(index + 1, *next);
      }
      float* states = scratch_.chunk_states;
      if (task_.partial_row >= 0) {
        const int64_t row = task_.partial_row + (index - task_.first_chunk) * num_rows_;
        states = partials + row * sizes_.state_stride;
      }
      AttendChunk(index, chunk, next, states);
      if (task_.partial_row >= 0) continue;
      for (int64_t row = 0; row < num_rows_; ++row) {
        Fold(states + row * sizes_.state_stride, sizes_.padded_dim,
             scratch_.total_states + row * sizes_.state_stride);
      }
    }
    if (task_.partial_row >= 0) return;
    for (int64_t head = 0; head < sizes_.num_heads; ++head) {
      WriteOutput(args_, sizes_, task_.first_token, task_.num_tokens, first_head_ + head,
                  scratch_.total_states + head * tiling_.rows * sizes_.state_stride);
    }
  }

 private:
  using Reader = ChunkReader<T, kPacked>;
  using BlockT = typename Reader::BlockT;
  using ChunkT = typename Reader::ChunkT;
  using HeadBlockT = HeadBlock<typename Reader::Key, T>;

  // Computes the rows' states over one chunk, from nothing.
  void AttendChunk(int64_t index, const ChunkT& chunk, const ChunkT* next, float* states) {
    ClearStates(sizes_, num_rows_, states);
    for (int64_t row = 0; row < tiling_.rows; ++row) {
      const int64_t position = args_.positions[task_.first_token + row / sizes_.group];
      for (int64_t b = 0; b < kChunkBlocks; ++b) {
        const int64_t first = index * kAttentionChunk + b * kBlock;
        Masks(row)[b] = chunk.blocks[b].stored & VisibleBits(position, args_.window, first);
      }
    }
    ForVisibleTiles(chunk, next,
                    [&]<int R>(int64_t head, int64_t head_row, int64_t b, uint64_t visible,
                               const HeadBlockT& now, const HeadBlockT* prefetch) HWY_ATTR {
                      const int64_t row = head * tiling_.rows + head_row;
                      ScoreBlock<R>(scratch_.query + row * sizes_.head_dim, sizes_.head_dim,
                                    visible, now, prefetch, Scores(row) + b * kBlock);
                    });
    for (int64_t row = 0; row < num_rows_; ++row) {
      float* stats = states + row * sizes_.state_stride + sizes_.padded_dim;
      Softmax(Masks(row % tiling_.rows), args_.scale, Scores(row), stats[0], stats[1]);
    }
    ForVisibleTiles(chunk, next,
                    [&]<int R>(int64_t head, int64_t head_row, int64_t b, uint64_t visible,
                               const HeadBlockT& now, const HeadBlockT* prefetch) HWY_ATTR {
                      const int64_t row = head * tiling_.rows + head_row;
                      AccumulateBlock<R>(Masks(head_row) + b, Scores(row) + b * kBlock, now,
                                         prefetch, sizes_, states + row * sizes_.state_stride);
                    });
  }

  HeadBlockT OfHead(const BlockT* block, int64_t head) const {
    return {block, head * args_.kv.k.head_stride, head * args_.kv.v.head_stride};
  }

  // Calls body<R>(head of the task, first row of the head, block, tokens that some row sees, what
  // it sees, what to prefetch or null) for each block, in it each head, and of that each tile of R
  // rows that see something of it.
  template <typename Body>
  HWY_INLINE void ForVisibleTiles(const ChunkT& chunk, const ChunkT* next, const Body& body) {
    for (int64_t b = 0; b < kChunkBlocks; ++b) {
      if (chunk.blocks[b].stored == 0) continue;
      const BlockT* next_block = b + 1 < kChunkBlocks ? &chunk.blocks[b + 1]
                                 : next != nullptr    ? &next->blocks[0]
                                                      : nullptr;
      if (next_block != nullptr && next_block->stored == 0) next_block = nullptr;
      for (int64_t head = 0; head < sizes_.num_heads; ++head) {
        const bool last_head = head + 1 == sizes_.num_heads;
        const HeadBlockT now = OfHead(&chunk.blocks[b], head);
        const HeadBlockT then =
            last_head ? OfHead(next_block, 0) : OfHead(&chunk.blocks[b], head + 1);
        const HeadBlockT* prefetch = then.block != nullptr ? &then : nullptr;
        for (int64_t tile = 0; tile < tiling_.num_tiles; ++tile) {
          const int64_t row = tiling_.Begin(tile), end = tiling_.Begin(tile + 1);
          uint64_t visible = 0;
          for (int64_t r = row; r < end; ++r) visible |= Masks(r)[b];
          if (visible == 0) continue;
          CallWithRows<1>(end - row, [&]<int R>() HWY_ATTR {
            body.template operator()<R>(head, row, b, visible, now, prefetch);
          });
          prefetch = nullptr;  // Once is enough.
        }
      }
    }
  }

  // Calls body<rows>().
  template <int R, typename Body>
  static HWY_INLINE void CallWithRows(int64_t rows, const Body& body) {
    if constexpr (R < kTileRows) {
      if (rows > R) return CallWithRows<R + 1>(rows, body);
    }
    body.template operator()<R>();
  }

  uint64_t* Masks(int64_t row) const { return scratch_.masks + row * kChunkBlocks; }
  float* Scores(int64_t row) const { return scratch_.scores + row * kScoreStride; }

  const GqaAttentionArgs& args_;
  const GqaSizes& sizes_;
  const AttentionTask& task_;
  const Scratch scratch_;
  const Tiling tiling_;
  const int64_t num_rows_;
  const int64_t first_head_;
};

template <typename T>
void RunTaskOf(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionTask& task,
               float* partials, float* thread_memory) {
  if (args.kv.page_size >= kMaxAttentionLanes) {
    TaskRunner<T, false>(args, sizes, task, thread_memory).Run(partials);
  } else {
    TaskRunner<T, true>(args, sizes, task, thread_memory).Run(partials);
  }
}

void RunTask(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionTask& task,
             float* partials, float* thread_memory) {
  switch (args.kv.k.dtype) {
    case DType::kBFloat16:
      return RunTaskOf<hwy::bfloat16_t>(args, sizes, task, partials, thread_memory);
    case DType::kFloat16:
      return RunTaskOf<hwy::float16_t>(args, sizes, task, partials, thread_memory);
    default:
      return RunTaskOf<float>(args, sizes, task, partials, thread_memory);
  }
}

// The rows of one KV head of a merge.
void RunMerge(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionMerge& merge,
              int64_t head, float* partials) {
  const int64_t rows = merge.num_tokens * sizes.group;
  const int64_t chunk_rows = sizes.num_heads * rows;
  float* total = partials + (merge.partial_row + head * rows) * sizes.state_stride;
  for (int64_t chunk = 1; chunk < merge.num_chunks; ++chunk) {
    for (int64_t row = 0; row < rows; ++row) {
      Fold(total + (chunk * chunk_rows + row) * sizes.state_stride, sizes.padded_dim,
           total + row * sizes.state_stride);
    }
  }
  WriteOutput(args, sizes, merge.first_token, merge.num_tokens,
              merge.group * sizes.num_heads + head, total);
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
HWY_EXPORT(RunTask);
HWY_EXPORT(RunMerge);

// Rows that share one pass over K and V: enough to compute while data is near, few enough for
// their states to stay in the second-level cache.
constexpr int64_t kMaxRows = 64;
// States are small beside what is read, so contexts are cut freely.
constexpr int64_t kTasksBeforeSplits = 6;

// KV heads of a task: as many as let the tokens of the longest query share a pass and still leave
// each thread some tasks. Packed keys are of one.
int64_t HeadsOfTask(const GqaAttentionArgs& args, int num_threads) {
  if (args.kv.page_size < kMaxAttentionLanes) return 1;
  int64_t longest = 1;
  for (int64_t i = 0; i < args.num_sequences; ++i) {
    longest = std::max<int64_t>(longest, args.query_starts[i + 1] - args.query_starts[i]);
  }
  const int64_t num_heads = args.kv.num_kv_heads;
  const int64_t max_heads = kMaxRows / (args.num_query_heads / num_heads * longest);
  const int64_t num_pages = args.kv.page_starts[args.num_sequences] - args.kv.page_starts[0];
  const int64_t num_chunks = std::max<int64_t>(1, num_pages * args.kv.page_size / kAttentionChunk);
  const int64_t wanted = num_threads == 1 ? 1 : num_threads * kTasksBeforeSplits;
  int64_t heads = std::clamp<int64_t>(max_heads, 1, num_heads);
  while (heads > 1 && (num_heads % heads != 0 || num_heads / heads * num_chunks < wanted)) --heads;
  return heads;
}

absl::Status GqaAttentionCpu(const GqaAttentionArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateGqaAttention(args));
  if (args.q.rows == 0 || args.num_query_heads == 0) return absl::OkStatus();
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    const int64_t heads = HeadsOfTask(args, pool.num_threads());
    const int64_t group = args.num_query_heads / args.kv.num_kv_heads;
    ASSIGN_OR_RETURN(const AttentionPlan plan,
                     PlanAttention({.op = "gqa_attention",
                                    .num_tokens = args.q.rows,
                                    .num_sequences = args.num_sequences,
                                    .query_starts = args.query_starts,
                                    .positions = args.positions,
                                    .window = args.window,
                                    .page_size = args.kv.page_size,
                                    .page_starts = args.kv.page_starts,
                                    .pages = args.kv.pages,
                                    .chunk = kAttentionChunk,
                                    .num_groups = args.kv.num_kv_heads / heads,
                                    .group_heads = heads * group,
                                    .max_rows = kMaxRows,
                                    .tasks_before_splits = kTasksBeforeSplits},
                                   pool.num_threads()));
    const GqaSizes sizes(args, heads, plan.max_rows);
    const int64_t num_partials = GqaSizes::Aligned(plan.num_partial_rows * sizes.state_stride);
    float* partials = reinterpret_cast<float*>(
        pool.Scratch((num_partials + pool.num_threads() * sizes.per_thread) * sizeof(float)));
    float* thread_memory = partials + num_partials;

    const auto run_task = HWY_DYNAMIC_DISPATCH(RunTask);
    std::atomic<int64_t> next_task{0};
    const auto num_tasks = static_cast<int64_t>(plan.tasks.size());
    pool.ParallelRun([&](int thread) {
      float* memory = thread_memory + thread * sizes.per_thread;
      for (int64_t i; (i = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        run_task(args, sizes, plan.tasks[i], partials, memory);
      }
    });
    const auto run_merge = HWY_DYNAMIC_DISPATCH(RunMerge);
    pool.ParallelFor(static_cast<int64_t>(plan.merges.size()) * heads, [&](int64_t i) {
      run_merge(args, sizes, plan.merges[i / heads], i % heads, partials);
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
