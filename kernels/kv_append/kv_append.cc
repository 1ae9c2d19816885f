#include "kernels/kv_append/kv_append.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateKvAppend(const KvAppendArgs& args) {
  const KvPlaneShape shape{args.num_kv_heads, args.head_dim, args.page_size};
  RETURN_IF_ERROR(ValidateKvPlane("kv_append", "k_plane", args.k_plane, shape));
  RETURN_IF_ERROR(ValidateKvPlane("kv_append", "v_plane", args.v_plane, shape));
  RETURN_IF_ERROR(ValidateFloatMatrix("kv_append", "k", args.k));
  RETURN_IF_ERROR(ValidateFloatMatrix("kv_append", "v", args.v));
  const int64_t width = args.num_kv_heads * args.head_dim;
  RETURN_IF_ERROR(ValidateShape("kv_append", "k", args.k, args.k.rows, width));
  RETURN_IF_ERROR(ValidateShape("kv_append", "v", args.v, args.k.rows, width));
  RETURN_IF_ERROR(ValidateArray("kv_append", "slots", args.slots, args.k.rows));
  return ValidateArray("kv_append", "page_offsets", args.page_offsets, args.k.rows);
}

absl::Status ValidateKvCopyPages(const KvCopyPagesArgs& args) {
  for (const KvPlane& plane : {args.source, args.target}) {
    const int64_t slot_bytes = plane.slot_stride * BlockBytes(plane.dtype);
    if (args.bytes_per_page < 0 || args.bytes_per_page > slot_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "kv_copy_pages: pages of ", args.bytes_per_page, " bytes in slots of ", slot_bytes));
    }
  }
  if (args.num_pages < 0) {
    return absl::InvalidArgumentError(absl::StrCat("kv_copy_pages: ", args.num_pages, " pages"));
  }
  const int64_t bytes = args.num_pages > 0 ? args.bytes_per_page : 0;
  RETURN_IF_ERROR(ValidateArray("kv_copy_pages", "source", args.source.data, bytes));
  RETURN_IF_ERROR(ValidateArray("kv_copy_pages", "target", args.target.data, bytes));
  RETURN_IF_ERROR(
      ValidateArray("kv_copy_pages", "source_slots", args.source_slots, args.num_pages));
  return ValidateArray("kv_copy_pages", "target_slots", args.target_slots, args.num_pages);
}

}  // namespace heddle
