// Causal attention of grouped queries over the paged cache (MHA and MQA are the ends of GQA).
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// Prefill and decode are one op: sequences have ragged query lengths >= 1. The step's own keys have
// been appended before. A query at position p sees the stored positions q with q <= p and, with a
// window w > 0, q > p - w.
//
// The context is cut in chunks at fixed global positions (multiples of kAttentionChunk). Each
// chunk's (maximum, sum, output) is computed in one order, and chunks are folded in ascending
// order: neither threads nor batch mates nor the query length change a row's bits. Masked slots
// never enter arithmetic. A query that sees nothing gives zeros and log-sum-exp of -infinity.
inline constexpr int64_t kAttentionChunk = 256;

struct GqaAttentionArgs {
  ConstMatrixView q;  // [tokens, query_heads * head_dim], rotated
  PagedKvView kv;     // query head h reads KV head h / (num_query_heads / num_kv_heads)
  int64_t num_query_heads = 0;
  int64_t num_sequences = 0;
  const int32_t* query_starts = nullptr;  // [num_sequences + 1], device, into the tokens
  const int32_t* positions = nullptr;     // [tokens], device
  float scale = 1.0f;                     // times q.k
  int64_t window = 0;                     // 0: none
  MatrixView out;                         // [tokens, query_heads * head_dim]
  float* log_sum_exp = nullptr;           // [tokens, query_heads], or null
};

absl::Status ValidateGqaAttention(const GqaAttentionArgs& args);
using GqaAttentionFn = absl::Status (*)(const GqaAttentionArgs& args, Stream& stream);

// The same without a cache: keys and values are the step's own tokens, each sequence whole from its
// first position. The path of --no-kv-cache, and an oracle for the paged one.
struct DenseAttentionArgs {
  ConstMatrixView q;  // [tokens, query_heads * head_dim], rotated
  ConstMatrixView k;  // [tokens, kv_heads * head_dim], rotated
  ConstMatrixView v;  // [tokens, kv_heads * head_dim]
  int64_t num_query_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t num_sequences = 0;
  const int32_t* query_starts = nullptr;  // [num_sequences + 1], device, into the tokens
  float scale = 1.0f;
  int64_t window = 0;
  MatrixView out;  // [tokens, query_heads * head_dim]
};

absl::Status ValidateDenseAttention(const DenseAttentionArgs& args);
using DenseAttentionFn = absl::Status (*)(const DenseAttentionArgs& args, Stream& stream);

}  // namespace heddle
