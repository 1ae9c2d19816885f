// Per KV head and context token, with G query heads a KV head and T query tokens in a block: reads
// 2 * head_dim elements of K and V once, computes G * T * 2 * head_dim multiply-adds and G * T
// exponentials. Decode (T = 1) is bound by memory for G up to about 8, so K and V are read where
// they lie, widened in registers, and the next chunk is prefetched while this one is computed.
// Prefill is bound by arithmetic: tiles of rows keep R x V sums in registers.
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/gqa_plan.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/gqa_attention_cpu.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"

#ifndef HEDDLE_KERNELS_ATTENTION_GQA_ATTENTION_CPU_ONCE_
#define HEDDLE_KERNELS_ATTENTION_GQA_ATTENTION_CPU_ONCE_
namespace heddle {

// Floats of the working memory of one call.
struct GqaSizes {
  static constexpr int64_t kMaxLanes = 16;
  // Scores of a row: a chunk, and room for a vector that begins at its last token.
  static constexpr int64_t kScoreStride = kAttentionChunk + kMaxLanes;
  static constexpr int64_t kTileRows = 4;

  GqaSizes(const GqaAttentionArgs& args, int64_t max_rows)
      : group(args.num_query_heads / args.kv.num_kv_heads),
        head_dim(args.kv.head_dim),
        padded_dim((head_dim + kMaxLanes - 1) / kMaxLanes * kMaxLanes),
        state_stride(padded_dim + kMaxLanes),
        query(Aligned(max_rows * head_dim)),
        scores(kTileRows * kScoreStride),
        tile_states(kTileRows * state_stride),
        states(max_rows * state_stride),
        packed_keys(2 * Aligned(head_dim * kAttentionChunk + kMaxLanes)),
        masks(Aligned(2 * max_rows)),
        per_thread(query + scores + tile_states + 2 * states + packed_keys + masks) {}

  static int64_t Aligned(int64_t floats) { return (floats + 31) / 32 * 32; }

  int64_t group;
  int64_t head_dim;
  int64_t padded_dim;
  int64_t state_stride;  // output [padded_dim], maximum, sum
  int64_t query;
  int64_t scores;
  int64_t tile_states;
  int64_t states;
  int64_t packed_keys;
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

// The stored tokens of one chunk of one KV head. Token t of the chunk has the chunk's first
// position + t and bit t of `stored`.
template <typename TK, typename TV>
struct Chunk {
  uint64_t stored = 0;
  // Vectors of neighbouring tokens, in order: k[i][dim * k_stride] begins at token k_token[i].
  // Lanes past the end of a page hold anything and are overwritten by the next vector's scores.
  // Pointers past num_vectors may be prefetched, not read.
  int64_t num_vectors = 0;
  int64_t k_stride = 0;
  const TK* k[kAttentionChunk];
  int64_t k_token[kAttentionChunk];
  const TV* v[kAttentionChunk];
};

// Finds chunks, in ascending order, in the pages of one sequence and KV head. Pages too narrow for
// vectors of tokens are packed into `packed_keys`, [head_dim, kAttentionChunk] for each of two
// chunks in turn.
template <typename T, bool kPacked>
class ChunkReader {
 public:
  using Key = std::conditional_t<kPacked, float, T>;
  using ChunkT = Chunk<Key, T>;

  ChunkReader(const PagedKvView& kv, const GqaTask& task, float* packed_keys, int64_t packed_stride)
      : kv_(kv),
        page_(kv.pages + kv.page_starts[task.sequence]),
        end_(kv.pages + kv.page_starts[task.sequence + 1]),
        k_(static_cast<const T*>(kv.k.data) + task.kv_head * kv.k.head_stride),
        v_(static_cast<const T*>(kv.v.data) + task.kv_head * kv.v.head_stride),
        packed_keys_(packed_keys),
        packed_stride_(packed_stride) {
    // The first page that ends behind the task's first position.
    const int64_t first = task.first_chunk * kAttentionChunk;
    page_ = std::partition_point(page_, end_, [first](const PageSpan& page) {
      return int64_t{page.first_position} + page.num_valid <= first;
    });
  }

  void Read(int64_t index, ChunkT& chunk) {
    const int64_t first = index * kAttentionChunk, end = first + kAttentionChunk;
    chunk.stored = 0;
    chunk.num_vectors = 0;
    chunk.k_stride = kPacked ? kAttentionChunk : kv_.page_size;
    for (; page_ < end_; ++page_) {
      const int64_t page_first = page_->first_position;
      const int64_t page_end = page_first + page_->num_valid;
      const int64_t begin = std::max(first, page_first);
      const int64_t count = std::min(end, page_end) - begin;
      if (count > 0) AddTokens(begin - page_first, begin - first, count, chunk);
      if (page_end >= end) break;  // The next chunk may go on in this page.
    }
    if constexpr (kPacked) {
      for (int64_t t = 0; t < kAttentionChunk; t += kLanes) {
        chunk.k[chunk.num_vectors] = packed_keys_ + t;
        chunk.k_token[chunk.num_vectors++] = t;
      }
      packed_keys_ += packed_stride_;
      packed_stride_ = -packed_stride_;
    }
    // What is not there is prefetched as something that is.
    if constexpr (!kPacked) {
      if (chunk.num_vectors == 0) chunk.k[0] = k_;
    }
    for (int64_t i = chunk.num_vectors; i < kAttentionChunk; ++i) chunk.k[i] = chunk.k[0];
    if (~chunk.stored != 0) {
      for (int64_t t = 0; t < kAttentionChunk; ++t) {
        if ((chunk.stored >> t & 1) == 0) chunk.v[t] = v_;
      }
    }
  }

 private:
  // Tokens [offset, offset + count) of the current page are tokens [token, ...) of the chunk.
  void AddTokens(int64_t offset, int64_t token, int64_t count, ChunkT& chunk) {
    const T* k = k_ + page_->slot * kv_.k.slot_stride + offset;
    const T* v = v_ + page_->slot * kv_.v.slot_stride + offset * kv_.head_dim;
    if constexpr (kPacked) {
      for (int64_t dim = 0; dim < kv_.head_dim; ++dim) {
        for (int64_t i = 0; i < count; ++i) {
          packed_keys_[dim * kAttentionChunk + token + i] =
              hn::GetLane(LoadWide(k + dim * kv_.page_size + i));
        }
      }
    } else {
      for (int64_t i = 0; i < count; i += kLanes) {
        chunk.k[chunk.num_vectors] = k + i;
        chunk.k_token[chunk.num_vectors++] = token + i;
      }
    }
    for (int64_t i = 0; i < count; ++i) chunk.v[token + i] = v + i * kv_.head_dim;
    chunk.stored |= (~uint64_t{0} >> (kAttentionChunk - count)) << token;
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
                             const TK* const* next_k, int64_t k_stride, const int64_t* k_token,
                             float* HWY_RESTRICT scores) {
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
      if (next_k != nullptr) hwy::Prefetch(next_keys[v] + dim * k_stride);
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

template <int R, typename TK, typename TV>
HWY_INLINE void Score(const float* q, int64_t head_dim, const Chunk<TK, TV>& chunk,
                      const Chunk<TK, TV>* next, float* scores) {
  constexpr int kVectors = TileVectors<R>();
  const TK* const* next_k = next != nullptr ? next->k : nullptr;
  int64_t i = 0;
  for (; i + kVectors <= chunk.num_vectors; i += kVectors) {
    ScoreVectors<R, kVectors>(q, head_dim, chunk.k + i, next_k, chunk.k_stride, chunk.k_token + i,
                              scores);
    if (next_k != nullptr) next_k += kVectors;
  }
  for (; i < chunk.num_vectors; ++i) {
    ScoreVectors<R, 1>(q, head_dim, chunk.k + i, next_k, chunk.k_stride, chunk.k_token + i, scores);
    if (next_k != nullptr) ++next_k;
  }
}

// Turns the scores of the tokens in `mask` into weights exp(score - maximum), those of the others
// into 0, whatever they were.
HWY_INLINE void Softmax(uint64_t mask, float* HWY_RESTRICT scores, float& maximum, float& sum) {
  const FloatTag d;
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto mask_at = [mask](int64_t token) HWY_ATTR {
    const uint64_t bits = mask >> token;
    return hn::LoadMaskBits(FloatTag(), reinterpret_cast<const uint8_t*>(&bits));
  };
  auto maxima = lowest;
  for (int64_t t = 0; t < kAttentionChunk; t += kLanes) {
    maxima = hn::Max(hn::IfThenElse(mask_at(t), hn::LoadU(d, scores + t), lowest), maxima);
  }
  const auto max = hn::MaxOfLanes(d, maxima);
  auto sums = hn::Zero(d);
  for (int64_t t = 0; t < kAttentionChunk; t += kLanes) {
    const auto weights = Exp(d, hn::Sub(hn::LoadU(d, scores + t), max));
    const auto visible = hn::IfThenElseZero(mask_at(t), weights);
    hn::StoreU(visible, d, scores + t);
    sums = hn::Add(sums, visible);
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
      if (next_values != nullptr) hwy::Prefetch(next_values[t] + dim + v * kLanes);
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
HWY_INLINE void Accumulate(uint64_t mask, const float* weights, const TV* const* values,
                           const TV* const* next_values, const GqaSizes& sizes, float* states) {
  constexpr int kVectors = TileVectors<R>();
  while (mask != 0) {
    const int begin = std::countr_zero(mask);
    const int end = begin + std::countr_one(mask >> begin);
    mask &= end == kAttentionChunk ? 0 : ~uint64_t{0} << end;
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
  const auto into_scale = Exp(d, hn::Set(d, into_stats[0] - maximum));
  const auto from_scale = Exp(d, hn::Set(d, from_stats[0] - maximum));
  for (int64_t dim = 0; dim < padded_dim; dim += kLanes) {
    const auto scaled = hn::Mul(hn::LoadU(d, into + dim), into_scale);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, from + dim), from_scale, scaled), d, into + dim);
  }
  into_stats[0] = maximum;
  into_stats[1] = hn::GetLane(hn::MulAdd(hn::Set(d, from_stats[1]), from_scale,
                                         hn::Mul(hn::Set(d, into_stats[1]), into_scale)));
}

// Folds one chunk into the states of R rows; the rows see the tokens of their masks. Prefetches
// `next` on the way unless it is null.
template <int R, typename TK, typename TV>
void FoldChunk(const float* q, const uint64_t* masks, const Chunk<TK, TV>& chunk,
               const Chunk<TK, TV>* next, const GqaSizes& sizes, float* scores, float* tile_states,
               float* states) {
  uint64_t any = 0, all = ~uint64_t{0};
  for (int r = 0; r < R; ++r) {
    any |= masks[r];
    all &= masks[r];
  }
  if (any == 0) return;
  Score<R>(q, sizes.head_dim, chunk, next, scores);
  for (int r = 0; r < R; ++r) {
    float* state = tile_states + r * sizes.state_stride;
    std::memset(state, 0, sizes.padded_dim * sizeof(float));
    Softmax(masks[r], scores + r * kScoreStride, state[sizes.padded_dim],
            state[sizes.padded_dim + 1]);
  }
  // Tokens that only some rows see lie before those that all see (windows) or behind them
  // (causality); each row takes its tokens in order.
  const uint64_t before = all == 0 ? ~uint64_t{0} : (all & -all) - 1;
  for (int pass = 0; pass < 2; ++pass) {
    for (int r = 0; r < R; ++r) {
      const uint64_t mask = masks[r] & ~all & (pass == 0 ? before : ~before);
      Accumulate<1, TV>(mask, scores + r * kScoreStride, chunk.v, nullptr, sizes,
                        tile_states + r * sizes.state_stride);
    }
    if (pass == 0) {
      Accumulate<R, TV>(all, scores, chunk.v, next != nullptr ? next->v : nullptr, sizes,
                        tile_states);
    }
  }
  for (int r = 0; r < R; ++r) {
    Fold(tile_states + r * sizes.state_stride, sizes.padded_dim, states + r * sizes.state_stride);
  }
}

// The working memory of one thread.
struct Scratch {
  Scratch(float* base, const GqaSizes& sizes)
      : query(base),
        scores(query + sizes.query),
        tile_states(scores + sizes.scores),
        span_states(tile_states + sizes.tile_states),
        total_states(span_states + sizes.states),
        packed_keys(total_states + sizes.states),
        masks(reinterpret_cast<uint64_t*>(packed_keys + sizes.packed_keys)) {}

  float* query;  // scaled; each tile [head_dim, rows of the tile]
  float* scores;
  float* tile_states;
  float* span_states;
  float* total_states;
  float* packed_keys;
  uint64_t* masks;  // [rows]
};

void ClearStates(const GqaSizes& sizes, int64_t rows, float* states) {
  for (int64_t row = 0; row < rows; ++row) {
    states[row * sizes.state_stride + sizes.padded_dim] = -std::numeric_limits<float>::infinity();
    states[row * sizes.state_stride + sizes.padded_dim + 1] = 0.0f;
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
    for (int64_t dim = 0; dim < sizes.head_dim; ++dim) {
      out[dim] = sum == 0.0f ? 0.0f : state[dim] / sum;
    }
    if (args.log_sum_exp != nullptr) {
      args.log_sum_exp[token * args.num_query_heads + head] =
          state[sizes.padded_dim] + (sum == 0.0f ? 0.0f : std::log(sum));
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

void PackQueries(const GqaAttentionArgs& args, const GqaSizes& sizes, const GqaTask& task,
                 const Tiling& tiling, float* packed) {
  for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
    const int64_t begin = tiling.Begin(tile), tile_rows = tiling.Begin(tile + 1) - begin;
    float* target = packed + begin * sizes.head_dim;
    for (int64_t r = 0; r < tile_rows; ++r) {
      const int64_t row = begin + r;
      const float* q = args.q.Row<float>(task.first_token + row / sizes.group) +
                       (task.kv_head * sizes.group + row % sizes.group) * sizes.head_dim;
      for (int64_t dim = 0; dim < sizes.head_dim; ++dim) {
        target[dim * tile_rows + r] = q[dim] * args.scale;
      }
    }
  }
}

// Bits of the chunk's tokens that a query at `position` may see.
uint64_t VisibleBits(int64_t position, int64_t window, int64_t chunk_first) {
  const int64_t end = std::min(position + 1 - chunk_first, kAttentionChunk);
  const int64_t begin = window > 0 ? std::max<int64_t>(position + 1 - window - chunk_first, 0) : 0;
  if (begin >= end) return 0;
  return (~uint64_t{0} >> (kAttentionChunk - (end - begin))) << begin;
}

template <typename T, bool kPacked>
void RunTaskOf(const GqaAttentionArgs& args, const GqaSizes& sizes, const GqaTask& task,
               float* partials, float* thread_memory) {
  const Scratch scratch(thread_memory, sizes);
  const Tiling tiling(task.num_tokens * sizes.group);
  PackQueries(args, sizes, task, tiling, scratch.query);
  ChunkReader<T, kPacked> reader(args.kv, task, scratch.packed_keys, sizes.packed_keys / 2);
  typename ChunkReader<T, kPacked>::ChunkT chunks[2];
  const bool split = task.partial_row >= 0;
  float* span_states = split ? partials + task.partial_row * sizes.state_stride  //
                             : scratch.span_states;
  ClearStates(sizes, tiling.rows, span_states);
  ClearStates(sizes, tiling.rows, scratch.total_states);
  if (task.first_chunk < task.end_chunk) reader.Read(task.first_chunk, chunks[0]);

  for (int64_t index = task.first_chunk; index < task.end_chunk; ++index) {
    const auto& chunk = chunks[(index - task.first_chunk) % 2];
    auto& next = chunks[(index - task.first_chunk + 1) % 2];
    const bool is_last = index + 1 == task.end_chunk;
    if (!is_last) reader.Read(index + 1, next);
    for (int64_t row = 0; row < tiling.rows; ++row) {
      const int64_t position = args.positions[task.first_token + row / sizes.group];
      scratch.masks[row] =
          chunk.stored & VisibleBits(position, args.window, index * kAttentionChunk);
    }
    for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
      const int64_t begin = tiling.Begin(tile);
      const auto fold = [&]<int R>() HWY_ATTR {
        FoldChunk<R>(scratch.query + begin * sizes.head_dim, scratch.masks + begin, chunk,
                     tile == 0 && !is_last ? &next : nullptr, sizes, scratch.scores,
                     scratch.tile_states, span_states + begin * sizes.state_stride);
      };
      switch (tiling.Begin(tile + 1) - begin) {
        case 1:
          fold.template operator()<1>();
          break;
        case 2:
          fold.template operator()<2>();
          break;
        case 3:
          fold.template operator()<3>();
          break;
        default:
          fold.template operator()<4>();
      }
    }
    if (!is_last && (index + 1) % kSpanChunks != 0) continue;
    if (!split) {
      for (int64_t row = 0; row < tiling.rows; ++row) {
        Fold(span_states + row * sizes.state_stride, sizes.padded_dim,
             scratch.total_states + row * sizes.state_stride);
      }
    } else if (!is_last) {
      span_states += tiling.rows * sizes.state_stride;
    }
    if (!is_last) ClearStates(sizes, tiling.rows, span_states);
  }
  if (!split) {
    WriteOutput(args, sizes, task.first_token, task.num_tokens, task.kv_head, scratch.total_states);
  }
}

template <typename T>
void RunTaskOf(const GqaAttentionArgs& args, const GqaSizes& sizes, const GqaTask& task,
               float* partials, float* thread_memory) {
  if (args.kv.page_size >= GqaSizes::kMaxLanes) {
    RunTaskOf<T, false>(args, sizes, task, partials, thread_memory);
  } else {
    RunTaskOf<T, true>(args, sizes, task, partials, thread_memory);
  }
}

void RunTask(const GqaAttentionArgs& args, const GqaSizes& sizes, const GqaTask& task,
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

void RunMerge(const GqaAttentionArgs& args, const GqaSizes& sizes, const GqaMerge& merge,
              float* partials) {
  const int64_t rows = merge.num_tokens * sizes.group;
  float* total = partials + merge.partial_row * sizes.state_stride;
  for (int64_t row = rows; row < rows * merge.num_spans; ++row) {
    Fold(total + row * sizes.state_stride, sizes.padded_dim,
         total + row % rows * sizes.state_stride);
  }
  WriteOutput(args, sizes, merge.first_token, merge.num_tokens, merge.kv_head, total);
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
HWY_EXPORT(RunTask);
HWY_EXPORT(RunMerge);

absl::Status GqaAttentionCpu(const GqaAttentionArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateGqaAttention(args));
  if (args.q.rows == 0 || args.num_query_heads == 0) return absl::OkStatus();
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    ASSIGN_OR_RETURN(const GqaPlan plan, PlanGqa(args, pool.num_threads()));
    const GqaSizes sizes(args, plan.max_rows);
    const int64_t num_partials = plan.num_partial_rows * sizes.state_stride;
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
