// What attention sees of the paged cache: one layer's planes and, per sequence, its pages.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace heddle {

// One plane (K, V, latent or rotated key) of one layer. Strides are in elements and 64-bit.
struct KvPlane {
  void* data = nullptr;
  DType dtype = DType::kFloat32;  // float32, bfloat16 or float16
  int64_t slot_stride = 0;
  int64_t head_stride = 0;
};

// A page of a sequence: where it is, and which tokens it holds. Kernels never infer a position
// from a slot or an ordinal: leading pages may have been released, tails are partial.
struct PageSpan {
  int32_t slot = 0;
  int32_t num_valid = 0;       // tokens stored, counted from the page's start
  int32_t first_position = 0;  // position of the page's first token
};

// K is dimension-major inside a page, so that scores of neighbouring tokens form one vector; V is
// token-major. The arrays are in device memory at fixed addresses; positions ascend along a
// sequence's pages.
struct PagedKvView {
  KvPlane k;  // [slots, kv_heads, head_dim, page_size]
  KvPlane v;  // [slots, kv_heads, page_size, head_dim]
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t page_size = 0;
  const int32_t* page_starts = nullptr;  // [num_sequences + 1] into pages
  const PageSpan* pages = nullptr;       // [page_starts[num_sequences]]
};

// The same for MLA, whose heads share one latent and one rotated key. Both are token-major: all
// heads pass over a token while it is near.
struct PagedLatentView {
  KvPlane latent;  // [slots, page_size, kv_lora_rank]
  KvPlane rope;    // [slots, page_size, rope_dim]
  int64_t kv_lora_rank = 0;
  int64_t rope_dim = 0;
  int64_t page_size = 0;
  const int32_t* page_starts = nullptr;  // [num_sequences + 1] into pages
  const PageSpan* pages = nullptr;       // [page_starts[num_sequences]]
};

}  // namespace heddle
