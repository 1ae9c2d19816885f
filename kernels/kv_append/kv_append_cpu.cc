#include "kernels/kv_append/kv_append_cpu.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"

namespace heddle {
namespace {

// Writes source[i] to target[i * stride], rounded to the plane's type.
void StoreStrided(const float* source, int64_t count, const KvPlane& plane, int64_t index,
                  int64_t stride) {
  switch (plane.dtype) {
    case DType::kBFloat16: {
      uint16_t* target = static_cast<uint16_t*>(plane.data) + index;
      for (int64_t i = 0; i < count; ++i) target[i * stride] = FloatToBFloat16(source[i]);
      break;
    }
    case DType::kFloat16: {
      uint16_t* target = static_cast<uint16_t*>(plane.data) + index;
      for (int64_t i = 0; i < count; ++i) target[i * stride] = FloatToFloat16(source[i]);
      break;
    }
    default: {
      float* target = static_cast<float*>(plane.data) + index;
      for (int64_t i = 0; i < count; ++i) target[i * stride] = source[i];
    }
  }
}

void CopyHead(const KvPlane& plane, int64_t source_slot, int64_t target_slot, int64_t head,
              int64_t elements) {
  const int64_t element_bytes = BlockBytes(plane.dtype);
  const auto head_at = [&](int64_t slot) {
    return static_cast<char*>(plane.data) +
           (slot * plane.slot_stride + head * plane.head_stride) * element_bytes;
  };
  std::memcpy(head_at(target_slot), head_at(source_slot), elements * element_bytes);
}

}  // namespace

absl::Status KvAppendCpu(const KvAppendArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateKvAppend(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    for (int64_t token = 0; token < args.k.rows; ++token) {
      const int64_t offset = args.page_offsets[token];
      if (args.slots[token] >= 0 && (offset < 0 || offset >= args.page_size)) {
        return absl::OutOfRangeError(absl::StrCat("kv_append: token ", token, " has offset ",
                                                  offset, " in a page of ", args.page_size));
      }
    }
    ParallelRows(pool, args.k.rows, 2 * args.k.cols, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = args.slots[token], offset = args.page_offsets[token];
        if (slot < 0) continue;
        for (int64_t head = 0; head < args.num_kv_heads; ++head) {
          StoreStrided(args.k.Row<float>(token) + head * args.head_dim, args.head_dim, args.k_plane,
                       slot * args.k_plane.slot_stride + head * args.k_plane.head_stride + offset,
                       args.page_size);
          StoreStrided(args.v.Row<float>(token) + head * args.head_dim, args.head_dim, args.v_plane,
                       slot * args.v_plane.slot_stride + head * args.v_plane.head_stride +
                           offset * args.head_dim,
                       1);
        }
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status KvCopyPagesCpu(const KvCopyPagesArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateKvCopyPages(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    const int64_t elements = args.head_dim * args.page_size;
    ParallelRows(pool, args.num_pages, 2 * args.num_kv_heads * elements,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t page = begin; page < end; ++page) {
                     for (int64_t head = 0; head < args.num_kv_heads; ++head) {
                       CopyHead(args.k_plane, args.source_slots[page], args.target_slots[page],
                                head, elements);
                       CopyHead(args.v_plane, args.source_slots[page], args.target_slots[page],
                                head, elements);
                     }
                   }
                 });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
