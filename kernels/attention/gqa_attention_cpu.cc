// Per KV head and context token, with G query heads a KV head and T query tokens in a block: reads
// 2 * head_dim elements of K and V once, computes G * T * 2 * head_dim multiply-adds and G * T
// exponentials. Decode (T = 1) is bound by memory for G up to about 8, so K and V are read where
// they lie, widened in registers, and the next block of tokens is prefetched while this one is
// computed. Prefill is bound by arithmetic: tiles of rows keep R x V sums in registers, and all
// tiles pass over a block of K or V before the next block is touched.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/attention_plan.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/gqa_attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"

#ifndef HEDDLE_KERNELS_ATTENTION_GQA_ATTENTION_CPU_ONCE_
#define HEDDLE_KERNELS_ATTENTION_GQA_ATTENTION_CPU_ONCE_
namespace heddle {

// Tokens of a block; a 64-bit mask has one bit for each.
inline constexpr int64_t kBlock = 64;
inline constexpr int64_t kChunkBlocks = kAttentionChunk / kBlock;

// The working memory of a call, in floats.
struct GqaSizes {
  static constexpr int64_t kMaxLanes = 16;
  static constexpr int64_t kTileRows = 4;
  // Scores of a row: a chunk, and room for a vector that begins at its last token.
  static constexpr int64_t kScoreStride = kAttentionChunk + kMaxLanes;

  GqaSizes(const GqaAttentionArgs& args, int64_t max_rows)
      : group(args.num_query_heads / args.kv.num_kv_heads),
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

using FloatTag = hn::CappedTag<float, GqaSizes::kMaxLanes>;
using FloatVec = hn::Vec<FloatTag>;
constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
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

HWY_INLINE FloatVec LoadWide(const float* from) { return hn::LoadU(FloatTag(), from); }

HWY_INLINE FloatVec LoadWide(const hwy::bfloat16_t* from) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Rebind<uint32_t, FloatTag> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

HWY_INLINE FloatVec LoadWide(const hwy::float16_t* from) {
  return hn::PromoteTo(FloatTag(), hn::LoadU(hn::Rebind<hwy::float16_t, FloatTag>(), from));
}

// The stored tokens of one block of one KV head. Token t has the block's first position + t and
// bit t of `stored`.
template <typename TK, typename TV>
struct Block {
  uint64_t stored = 0;
  // Vectors of neighbouring tokens, in order: k[i][dim * k_stride] begins at token k_token[i].
  // Lanes past the end of a page hold anything and are overwritten by the next vector's scores.
  int64_t num_vectors = 0;
  int64_t k_stride = 0;
  const TK* k[kBlock];  // those past num_vectors may be prefetched, not read
  uint8_t k_token[kBlock];
  const TV* v[kBlock];  // those not stored may be prefetched, not read
};

template <typename TK, typename TV>
struct Chunk {
  Block<TK, TV> blocks[kChunkBlocks];
};

// Finds chunks, in ascending order, in the pages of one sequence and KV head. Pages too narrow for
// vectors of tokens are packed into `packed_keys`, a block as [head_dim, kBlock], for each of two
// chunks in turn.
template <typename T, bool kPacked>
class ChunkReader {
 public:
  using Key = std::conditional_t<kPacked, float, T>;
  using BlockT = Block<Key, T>;
  using ChunkT = Chunk<Key, T>;

  ChunkReader(const PagedKvView& kv, const AttentionTask& task, float* packed_keys,
              int64_t packed_stride)
      : kv_(kv),
        page_(kv.pages + kv.page_starts[task.sequence]),
        end_(kv.pages + kv.page_starts[task.sequence + 1]),
        k_(static_cast<const T*>(kv.k.data) + task.group * kv.k.head_stride),
        v_(static_cast<const T*>(kv.v.data) + task.group * kv.v.head_stride),
        packed_keys_(packed_keys),
        packed_stride_(packed_stride) {
    // The first page that ends behind the task's first position.
    const int64_t first = task.first_chunk * kAttentionChunk;
    page_ = std::partition_point(page_, end_, [first](const PageSpan& page) {
      return int64_t{page.first_position} + page.num_valid <= first;
    });
  }

  void Read(int64_t index, ChunkT& chunk) {
    for (int64_t i = 0; i < kChunkBlocks; ++i) {
      ReadBlock(index * kAttentionChunk + i * kBlock, packed_keys_ + i * kBlock * kv_.head_dim,
                chunk.blocks[i]);
    }
    packed_keys_ += packed_stride_;
    packed_stride_ = -packed_stride_;
  }

 private:
  void ReadBlock(int64_t first, float* packed_keys, BlockT& block) {
    const int64_t end = first + kBlock;
    block.stored = 0;
    block.num_vectors = 0;
    block.k_stride = kPacked ? kBlock : kv_.page_size;
    for (; page_ < end_; ++page_) {
      const int64_t page_first = page_->first_position;
      const int64_t page_end = page_first + page_->num_valid;
      const int64_t begin = std::max(first, page_first);
      const int64_t count = std::min(end, page_end) - begin;
      if (count > 0) AddTokens(begin - page_first, begin - first, count, packed_keys, block);
      if (page_end >= end) break;  // The next block may go on in this page.
    }
    if (block.stored == 0) return;
    if constexpr (kPacked) {
      for (int64_t t = 0; t < kBlock; t += kLanes) AddVector(packed_keys + t, t, block);
    }
    // What is not there is prefetched as something that is.
    for (int64_t i = block.num_vectors; i < kBlock / kLanes; ++i) block.k[i] = block.k[0];
    for (uint64_t missing = ~block.stored; missing != 0; missing &= missing - 1) {
      block.v[std::countr_zero(missing)] = v_;
    }
  }

  // Tokens [offset, offset + count) of the current page are tokens [token, ...) of the block.
  void AddTokens(int64_t offset, int64_t token, int64_t count, float* packed_keys, BlockT& block) {
    const T* k = k_ + page_->slot * kv_.k.slot_stride + offset;
    const T* v = v_ + page_->slot * kv_.v.slot_stride + offset * kv_.head_dim;
    if constexpr (kPacked) {
      for (int64_t dim = 0; dim < kv_.head_dim; ++dim) {
        for (int64_t i = 0; i < count; ++i) {
          packed_keys[dim * kBlock + token + i] =
              hn::GetLane(LoadWide(k + dim * kv_.page_size + i));
        }
      }
    } else {
      for (int64_t i = 0; i < count; i += kLanes) AddVector(k + i, token + i, block);
    }
    for (int64_t i = 0; i < count; ++i) block.v[token + i] = v + i * kv_.head_dim;
    block.stored |= (~uint64_t{0} >> (kBlock - count)) << token;
  }

  static void AddVector(const Key* k, int64_t token, BlockT& block) {
    block.k[block.num_vectors] = k;
    block.k_token[block.num_vectors++] = static_cast<uint8_t>(token);
  }

  const PagedKvView& kv_;
  const PageSpan* page_;
  const PageSpan* const end_;
  const T* const k_;
  const T* const v_;
  float* packed_keys_;
  int64_t packed_stride_;
};

// scores[r][token] = q[r] . k[token] for V vectors of tokens. Prefetches next_k unless it is null.
template <int R, int V, typename TK>
HWY_INLINE void ScoreVectors(const float* HWY_RESTRICT q, int64_t head_dim, const TK* const* k,
                             int64_t k_stride, const uint8_t* k_token, const TK* const* next_k,
                             int64_t next_stride, float* HWY_RESTRICT scores) {
  const FloatTag d;
  FloatVec sums[R][V];
  const TK* keys[V];
  const TK* next_keys[V];
  for (int v = 0; v < V; ++v) {
    keys[v] = k[v];
    next_keys[v] = next_k != nullptr ? next_k[v] : nullptr;
    for (int r = 0; r < R; ++r) sums[r][v] = hn::Zero(d);
  }
  for (int64_t dim = 0; dim < head_dim; ++dim) {
    FloatVec key[V];
    for (int v = 0; v < V; ++v) {
      key[v] = LoadWide(keys[v] + dim * k_stride);
      if (next_k != nullptr) PrefetchFar(next_keys[v] + dim * next_stride);
    }
    for (int r = 0; r < R; ++r) {
      const auto query = hn::Set(d, q[dim * R + r]);
      for (int v = 0; v < V; ++v) sums[r][v] = hn::MulAdd(query, key[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      hn::StoreU(sums[r][v], d, scores + r * kScoreStride + k_token[v]);
    }
  }
}

// Scores of R rows and the tokens of a block; of the vectors that hold none of `visible`, nothing.
template <int R, typename TK, typename TV>
void ScoreBlock(const float* q, int64_t head_dim, uint64_t visible, const Block<TK, TV>& block,
                const Block<TK, TV>* next, float* scores) {
  constexpr int kVectors = TileVectors<R>();
  const int last_token = 63 - std::countl_zero(visible);
  int64_t i = 0;
  for (; i + kVectors <= block.num_vectors && block.k_token[i] <= last_token; i += kVectors) {
    // The next block's vectors as far as there are places for them.
    const TK* const* next_k =
        next != nullptr && i + kVectors <= kBlock / kLanes ? next->k + i : nullptr;
    ScoreVectors<R, kVectors>(q, head_dim, block.k + i, block.k_stride, block.k_token + i, next_k,
                              next_k != nullptr ? next->k_stride : 0, scores);
  }
  for (; i < block.num_vectors && block.k_token[i] <= last_token; ++i) {
    ScoreVectors<R, 1>(q, head_dim, block.k + i, block.k_stride, block.k_token + i,
                       static_cast<const TK* const*>(nullptr), 0, scores);
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
template <int R, int V, typename TV>
HWY_INLINE void AccumulateVectors(const float* HWY_RESTRICT weights, const TV* const* values,
                                  const TV* const* next_values, int64_t begin, int64_t end,
                                  int64_t dim, float* HWY_RESTRICT states, int64_t state_stride) {
  const FloatTag d;
  FloatVec sums[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      sums[r][v] = hn::LoadU(d, states + r * state_stride + dim + v * kLanes);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    FloatVec value[V];
    for (int v = 0; v < V; ++v) {
      value[v] = LoadWide(values[t] + dim + v * kLanes);
      if (next_values != nullptr) PrefetchFar(next_values[t] + dim + v * kLanes);
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
template <int R, typename TV>
void Accumulate(uint64_t mask, const float* weights, const TV* const* values,
                const TV* const* next_values, const GqaSizes& sizes, float* states) {
  constexpr int kVectors = TileVectors<R>();
  while (mask != 0) {
    const int begin = std::countr_zero(mask);
    const int end = begin + std::countr_one(mask >> begin);
    mask &= end == kBlock ? 0 : ~uint64_t{0} << end;
    int64_t dim = 0;
    for (; dim + kVectors * kLanes <= sizes.padded_dim; dim += kVectors * kLanes) {
      AccumulateVectors<R, kVectors>(weights, values, next_values, begin, end, dim, states,
                                     sizes.state_stride);
    }
    for (; dim < sizes.head_dim; dim += kLanes) {
      AccumulateVectors<R, 1>(weights, values, next_values, begin, end, dim, states,
                              sizes.state_stride);
    }
  }
}

// Adds the values of a block, weighted, to the states of R rows; row r sees the tokens of masks[r *
// kChunkBlocks]. Tokens that only some rows see lie before those that all see (windows) or behind
// them (causality); each row takes its tokens in order.
template <int R, typename TK, typename TV>
void AccumulateBlock(const uint64_t* masks, const float* weights, const Block<TK, TV>& block,
                     const Block<TK, TV>* next, const GqaSizes& sizes, float* states) {
  uint64_t all = ~uint64_t{0};
  for (int r = 0; r < R; ++r) all &= masks[r * kChunkBlocks];
  const uint64_t before = all == 0 ? ~uint64_t{0} : (all & -all) - 1;
  const auto add_some = [&](uint64_t tokens) HWY_ATTR {
    for (int r = 0; r < R; ++r) {
      Accumulate<1, TV>(masks[r * kChunkBlocks] & tokens, weights + r * kScoreStride, block.v,
                        nullptr, sizes, states + r * sizes.state_stride);
    }
  };
  if constexpr (R > 1) add_some(before & ~all);
  Accumulate<R, TV>(all, weights, block.v, next != nullptr ? next->v : nullptr, sizes, states);
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

  float* query;   // each tile [head_dim, rows of the tile]
  float* scores;  // [rows, kScoreStride]
  float* chunk_states;
  float* total_states;
  float* packed_keys;  // [2 chunks, kChunkBlocks, head_dim, kBlock]
  uint64_t* masks;     // [rows, kChunkBlocks]: the tokens that a row sees
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

// Rows of tile t of n: [rows * t / n, rows * (t + 1) / n).
struct Tiling {
  explicit Tiling(int64_t num_rows)
      : rows(num_rows), num_tiles((num_rows + kTileRows - 1) / kTileRows) {}
  int64_t Begin(int64_t tile) const { return rows * tile / num_tiles; }
  int64_t rows;
  int64_t num_tiles;
};

void PackQueries(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionTask& task,
                 const Tiling& tiling, float* packed) {
  for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
    const int64_t begin = tiling.Begin(tile), tile_rows = tiling.Begin(tile + 1) - begin;
    float* target = packed + begin * sizes.head_dim;
    for (int64_t r = 0; r < tile_rows; ++r) {
      const int64_t row = begin + r;
      const float* q = args.q.Row<float>(task.first_token + row / sizes.group) +
                       (task.group * sizes.group + row % sizes.group) * sizes.head_dim;
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
        tiling_(task.num_tokens * sizes.group) {}

  void Run(float* partials) {
    PackQueries(args_, sizes_, task_, tiling_, scratch_.query);
    Reader reader(args_.kv, task_, scratch_.packed_keys, sizes_.packed_keys);
    ChunkT chunks[2];
    ClearStates(sizes_, tiling_.rows, scratch_.total_states);
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
        const int64_t row = task_.partial_row + (index - task_.first_chunk) * tiling_.rows;
        states = partials + row * sizes_.state_stride;
      }
      AttendChunk(index, chunk, next, states);
      if (task_.partial_row >= 0) continue;
      for (int64_t row = 0; row < tiling_.rows; ++row) {
        Fold(states + row * sizes_.state_stride, sizes_.padded_dim,
             scratch_.total_states + row * sizes_.state_stride);
      }
    }
    if (task_.partial_row >= 0) return;
    WriteOutput(args_, sizes_, task_.first_token, task_.num_tokens, task_.group,
                scratch_.total_states);
  }

 private:
  using Reader = ChunkReader<T, kPacked>;
  using BlockT = typename Reader::BlockT;
  using ChunkT = typename Reader::ChunkT;

  // Computes the rows' states over one chunk, from nothing.
  void AttendChunk(int64_t index, const ChunkT& chunk, const ChunkT* next, float* states) {
    ClearStates(sizes_, tiling_.rows, states);
    for (int64_t row = 0; row < tiling_.rows; ++row) {
      const int64_t position = args_.positions[task_.first_token + row / sizes_.group];
      for (int64_t b = 0; b < kChunkBlocks; ++b) {
        const int64_t first = index * kAttentionChunk + b * kBlock;
        Masks(row)[b] = chunk.blocks[b].stored & VisibleBits(position, args_.window, first);
      }
    }
    ForVisibleTiles(
        chunk, next,
        [&]<int R>(int64_t row, int64_t b, uint64_t visible, const BlockT* next_block) HWY_ATTR {
          ScoreBlock<R>(scratch_.query + row * sizes_.head_dim, sizes_.head_dim, visible,
                        chunk.blocks[b], next_block, Scores(row) + b * kBlock);
        });
    for (int64_t row = 0; row < tiling_.rows; ++row) {
      float* stats = states + row * sizes_.state_stride + sizes_.padded_dim;
      Softmax(Masks(row), args_.scale, Scores(row), stats[0], stats[1]);
    }
    ForVisibleTiles(
        chunk, next,
        [&]<int R>(int64_t row, int64_t b, uint64_t visible, const BlockT* next_block) HWY_ATTR {
          AccumulateBlock<R>(Masks(row) + b, Scores(row) + b * kBlock, chunk.blocks[b], next_block,
                             sizes_, states + row * sizes_.state_stride);
        });
  }

  template <int R, typename Body>
  static HWY_INLINE void CallWithRows(int64_t rows, int64_t row, int64_t b, uint64_t visible,
                                      const BlockT* next_block, const Body& body) {
    if constexpr (R < kTileRows) {
      if (rows > R) return CallWithRows<R + 1>(rows, row, b, visible, next_block, body);
    }
    body.template operator()<R>(row, b, visible, next_block);
  }

  // Calls body<R>(first row, block, tokens that some row sees, block to prefetch or null) for each
  // block and each tile of R rows that see something of it.
  template <typename Body>
  HWY_INLINE void ForVisibleTiles(const ChunkT& chunk, const ChunkT* next, const Body& body) {
    for (int64_t b = 0; b < kChunkBlocks; ++b) {
      if (chunk.blocks[b].stored == 0) continue;
      const BlockT* next_block = b + 1 < kChunkBlocks ? &chunk.blocks[b + 1]
                                 : next != nullptr    ? &next->blocks[0]
                                                      : nullptr;
      if (next_block != nullptr && next_block->stored == 0) next_block = nullptr;
      for (int64_t tile = 0; tile < tiling_.num_tiles; ++tile) {
        const int64_t row = tiling_.Begin(tile), end = tiling_.Begin(tile + 1);
        uint64_t visible = 0;
        for (int64_t r = row; r < end; ++r) visible |= Masks(r)[b];
        if (visible == 0) continue;
        CallWithRows<1>(end - row, row, b, visible, next_block, body);
        next_block = nullptr;  // Once is enough.
      }
    }
  }

  uint64_t* Masks(int64_t row) const { return scratch_.masks + row * kChunkBlocks; }
  float* Scores(int64_t row) const { return scratch_.scores + row * kScoreStride; }

  const GqaAttentionArgs& args_;
  const GqaSizes& sizes_;
  const AttentionTask& task_;
  const Scratch scratch_;
  const Tiling tiling_;
};

template <typename T>
void RunTaskOf(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionTask& task,
               float* partials, float* thread_memory) {
  if (args.kv.page_size >= GqaSizes::kMaxLanes) {
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

void RunMerge(const GqaAttentionArgs& args, const GqaSizes& sizes, const AttentionMerge& merge,
              float* partials) {
  const int64_t rows = merge.num_tokens * sizes.group;
  float* total = partials + merge.partial_row * sizes.state_stride;
  for (int64_t row = rows; row < rows * merge.num_chunks; ++row) {
    Fold(total + row * sizes.state_stride, sizes.padded_dim,
         total + row % rows * sizes.state_stride);
  }
  WriteOutput(args, sizes, merge.first_token, merge.num_tokens, merge.group, total);
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

absl::Status GqaAttentionCpu(const GqaAttentionArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateGqaAttention(args));
  if (args.q.rows == 0 || args.num_query_heads == 0) return absl::OkStatus();
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
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
                                    .num_groups = args.kv.num_kv_heads,
                                    .group_heads = group,
                                    .max_rows = kMaxRows,
                                    .tasks_before_splits = kTasksBeforeSplits},
                                   pool.num_threads()));
    const GqaSizes sizes(args, plan.max_rows);
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
    pool.ParallelFor(static_cast<int64_t>(plan.merges.size()),
                     [&](int64_t i) { run_merge(args, sizes, plan.merges[i], partials); });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
