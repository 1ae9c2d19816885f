#include "kernels/kv_append/kv_append_cpu.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"

namespace heddle {
namespace {

// Writes values[i] to element index + i * stride, rounded to the plane's type.
void StoreStrided(const float* values, int64_t count, const KvPlane& plane, int64_t index,
                  int64_t stride) {
  if (plane.dtype == DType::kFloat32) {
    float* target = static_cast<float*>(plane.data) + index;
    for (int64_t i = 0; i < count; ++i) target[i * stride] = values[i];
    return;
  }
  constexpr int64_t kPiece = 256;
  uint16_t halves[kPiece];
  uint16_t* target = static_cast<uint16_t*>(plane.data) + index;
  for (int64_t first = 0; first < count; first += kPiece) {
    const int64_t piece = std::min(kPiece, count - first);
    StoreFloats(values + first, piece, plane.dtype, halves);
    for (int64_t i = 0; i < piece; ++i) target[(first + i) * stride] = halves[i];
  }
}

void Store(const float* values, int64_t count, const KvPlane& plane, int64_t index) {
  StoreFloats(values, count, plane.dtype,
              static_cast<std::byte*>(plane.data) + index * BlockBytes(plane.dtype));
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
          Store(args.v.Row<float>(token) + head * args.head_dim, args.head_dim, args.v_plane,
                slot * args.v_plane.slot_stride + head * args.v_plane.head_stride +
                    offset * args.head_dim);
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
    if (args.bytes_per_page == 0) return absl::OkStatus();
    const auto slot_bytes = [](const KvPlane& plane) {
      return plane.slot_stride * BlockBytes(plane.dtype);
    };
    const auto* source = static_cast<const std::byte*>(args.source.data);
    auto* target = static_cast<std::byte*>(args.target.data);
    ParallelRows(pool, args.num_pages, args.bytes_per_page, [&](int64_t begin, int64_t end) {
      for (int64_t page = begin; page < end; ++page) {
        std::memcpy(target + args.target_slots[page] * slot_bytes(args.target),
                    source + args.source_slots[page] * slot_bytes(args.source),
                    args.bytes_per_page);
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
