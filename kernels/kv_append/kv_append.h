// Stores the step's keys and values in their pages.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

struct KvAppendArgs {
  ConstMatrixView k;  // [tokens, kv_heads * head_dim], rotated
  ConstMatrixView v;  // [tokens, kv_heads * head_dim]
  KvPlane k_plane;    // [slots, kv_heads, head_dim, page_size]
  KvPlane v_plane;    // [slots, kv_heads, page_size, head_dim]
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t page_size = 0;
  const int32_t* slots = nullptr;         // [tokens], device; -1: this rank stores nothing
  const int32_t* page_offsets = nullptr;  // [tokens], device: index inside the page
};

absl::Status ValidateKvAppend(const KvAppendArgs& args);
using KvAppendFn = absl::Status (*)(const KvAppendArgs& args, Stream& stream);

// Copies whole pages of one plane, whatever it holds, to slots of the same (copy-on-write) or
// another plane of that layout. No target may be among the sources, nor twice among the targets.
struct KvCopyPagesArgs {
  KvPlane source;
  KvPlane target;
  int64_t bytes_per_page = 0;             // at most the distance of two slots
  const int32_t* source_slots = nullptr;  // [num_pages], device
  const int32_t* target_slots = nullptr;  // [num_pages], device
  int64_t num_pages = 0;
};

absl::Status ValidateKvCopyPages(const KvCopyPagesArgs& args);
using KvCopyPagesFn = absl::Status (*)(const KvCopyPagesArgs& args, Stream& stream);

}  // namespace heddle
