// The keys and values of paged attention as they lie in memory, for files that are compiled once
// per Highway target.
#ifndef HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_ONCE_
#define HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_ONCE_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/attention/attention_plan.h"
#include "kernels/attention/gqa_attention.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// Tokens of a block; a 64-bit mask has one bit for each.
inline constexpr int64_t kBlock = 64;
inline constexpr int64_t kChunkBlocks = kAttentionChunk / kBlock;

// Floats of a vector, at most. Keys in pages of fewer tokens are packed before they are used.
inline constexpr int64_t kMaxAttentionLanes = 16;

}  // namespace heddle
#endif  // HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_ONCE_

#if defined(HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_INL_H_
#undef HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_INL_H_
#else
#define HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, kMaxAttentionLanes>;
using FloatVec = hn::Vec<FloatTag>;
constexpr int64_t kLanes = hn::MaxLanes(FloatTag());

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

// The stored tokens of one block, as the task's first KV head has them. Token t has the block's
// first position + t and bit t of `stored`.
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

// One KV head of a block: its elements lie behind those of the task's first head by an offset.
template <typename TK, typename TV>
struct HeadBlock {
  const Block<TK, TV>* block = nullptr;
  int64_t k_offset = 0;
  int64_t v_offset = 0;
};

// Finds chunks, in ascending order, in the pages of a task's sequence. Keys in pages too narrow for
// vectors of tokens are packed, those of the first head, into `packed_keys`, a block as
// [head_dim, kBlock], for each of two chunks in turn.
template <typename T, bool kPacked>
class ChunkReader {
 public:
  using Key = std::conditional_t<kPacked, float, T>;
  using BlockT = Block<Key, T>;
  using ChunkT = Chunk<Key, T>;

  ChunkReader(const PagedKvView& kv, const AttentionTask& task, int64_t first_head,
              float* packed_keys, int64_t packed_stride)
      : kv_(kv),
        page_(kv.pages + kv.page_starts[task.sequence]),
        end_(kv.pages + kv.page_starts[task.sequence + 1]),
        k_(static_cast<const T*>(kv.k.data) + first_head * kv.k.head_stride),
        v_(static_cast<const T*>(kv.v.data) + first_head * kv.v.head_stride),
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

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#endif  // HEDDLE_KERNELS_ATTENTION_GQA_CHUNK_READER_INL_H_
