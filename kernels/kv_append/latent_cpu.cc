#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"
#include "kernels/kv_append/kv_append_cpu.h"

namespace heddle {
namespace {

absl::Status CheckOffset(absl::string_view op, int64_t row, int64_t offset, int64_t page_size) {
  if (offset >= 0 && offset < page_size) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat(op, ": token ", row, " has offset ", offset, " in a page of ", page_size));
}

// Token `offset` of a page, of `width` elements.
std::byte* TokenAt(const KvPlane& plane, int64_t slot, int64_t offset, int64_t width) {
  return static_cast<std::byte*>(plane.data) +
         (slot * plane.slot_stride + offset * width) * BlockBytes(plane.dtype);
}

// `values` as they would be after a stay in a page.
void RoundThrough(const float* values, int64_t count, DType dtype, float* rounded) {
  constexpr int64_t kPiece = 256;
  uint16_t halves[kPiece];
  if (dtype == DType::kFloat32) {
    StoreFloats(values, count, dtype, rounded);
    return;
  }
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t piece = std::min(kPiece, count - i);
    StoreFloats(values + i, piece, dtype, halves);
    LoadFloats(halves, piece, dtype, rounded + i);
  }
}

}  // namespace

absl::Status LatentAppendCpu(const LatentAppendArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateLatentAppend(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    for (int64_t token = 0; token < args.latent.rows; ++token) {
      if (args.slots[token] < 0) continue;
      RETURN_IF_ERROR(
          CheckOffset("latent_append", token, args.page_offsets[token], args.page_size));
    }
    const int64_t width = args.latent.cols, rope_width = args.rope.cols;
    ParallelRows(pool, args.latent.rows, width + rope_width, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = args.slots[token], offset = args.page_offsets[token];
        if (slot < 0) continue;
        StoreFloats(args.latent.Row<float>(token), width, args.latent_plane.dtype,
                    TokenAt(args.latent_plane, slot, offset, width));
        StoreFloats(args.rope.Row<float>(token), rope_width, args.rope_plane.dtype,
                    TokenAt(args.rope_plane, slot, offset, rope_width));
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status LatentGatherCpu(const LatentGatherArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateLatentGather(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) -> absl::Status {
    for (int64_t i = 0; i < args.latent.rows; ++i) {
      if (args.slots[i] >= 0) {
        RETURN_IF_ERROR(CheckOffset("latent_gather", i, args.page_offsets[i], args.page_size));
      } else if (args.local_rows[i] >= args.local_latent.rows) {
        return absl::OutOfRangeError(absl::StrCat("latent_gather: token ", i, " asks for row ",
                                                  args.local_rows[i], " of ",
                                                  args.local_latent.rows));
      }
    }
    const int64_t width = args.latent.cols, rope_width = args.rope.cols;
    ParallelRows(pool, args.latent.rows, width + rope_width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t slot = args.slots[i], offset = args.page_offsets[i];
        const int64_t local = args.local_rows[i];
        float* latent = args.latent.Row<float>(i);
        float* rope = args.rope.Row<float>(i);
        if (slot >= 0) {
          LoadFloats(TokenAt(args.latent_plane, slot, offset, width), width,
                     args.latent_plane.dtype, latent);
          LoadFloats(TokenAt(args.rope_plane, slot, offset, rope_width), rope_width,
                     args.rope_plane.dtype, rope);
        } else if (local >= 0) {
          RoundThrough(args.local_latent.Row<float>(local), width, args.latent_plane.dtype, latent);
          RoundThrough(args.local_rope.Row<float>(local), rope_width, args.rope_plane.dtype, rope);
        } else {
          std::memset(latent, 0, width * sizeof(float));
          std::memset(rope, 0, rope_width * sizeof(float));
        }
      }
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
