#include <algorithm>
#include <cstring>
#include <vector>

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

// Where a row of latent_gather comes from: a row of the step, a token of a page, or nowhere.
struct LatentPlace {
  int64_t row = -1;
  int64_t slot = -1;
  int64_t offset = 0;
};

// Fills the places of one sequence's rows.
absl::Status FindPlaces(const LatentGatherArgs& args, int64_t sequence,
                        std::vector<LatentPlace>& places) {
  const int64_t begin = args.segment_starts[sequence], end = args.segment_starts[sequence + 1];
  if (begin < 0 || begin > end || end > args.latent.rows) {
    return absl::OutOfRangeError(
        absl::StrCat("rows ", begin, " to ", end, " of ", args.latent.rows));
  }
  const int64_t first_position = args.segment_positions[sequence];
  const int64_t end_position = first_position + end - begin;

  const int64_t first_query = args.query_starts[sequence];
  const int64_t end_query = args.query_starts[sequence + 1];
  if (first_query < 0 || first_query > end_query || end_query > args.local_latent.rows) {
    return absl::OutOfRangeError(
        absl::StrCat("tokens ", first_query, " to ", end_query, " of ", args.local_latent.rows));
  }
  int64_t stored_end = end_position;
  if (first_query < end_query) {
    const int64_t local_position = args.positions[first_query];
    stored_end = std::min(end_position, local_position);
    for (int64_t p = std::max(first_position, local_position);
         p < std::min(end_position, local_position + end_query - first_query); ++p) {
      places[begin + p - first_position].row = first_query + p - local_position;
    }
  }
  if (args.pages.latent.data == nullptr) return absl::OkStatus();

  for (int64_t i = args.pages.page_starts[sequence]; i < args.pages.page_starts[sequence + 1];
       ++i) {
    const PageSpan& page = args.pages.pages[i];
    if (page.slot < 0 || page.num_valid < 0 || page.num_valid > args.pages.page_size) {
      return absl::OutOfRangeError(absl::StrCat("page in slot ", page.slot, " holds ",
                                                page.num_valid, " of ", args.pages.page_size,
                                                " tokens"));
    }
    const int64_t page_begin = page.first_position;
    for (int64_t p = std::max(first_position, page_begin);
         p < std::min(stored_end, page_begin + page.num_valid); ++p) {
      places[begin + p - first_position] = {.row = -1, .slot = page.slot, .offset = p - page_begin};
    }
  }
  return absl::OkStatus();
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
    std::vector<LatentPlace> places(args.latent.rows);
    for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) {
      RETURN_IF_ERROR(Annotate(FindPlaces(args, sequence, places),
                               absl::StrCat("latent_gather: sequence ", sequence)));
    }
    const KvPlane& latent_plane = args.pages.latent;
    const KvPlane& rope_plane = args.pages.rope;
    const int64_t width = args.latent.cols, rope_width = args.rope.cols;
    ParallelRows(pool, args.latent.rows, width + rope_width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const LatentPlace& place = places[i];
        float* latent = args.latent.Row<float>(i);
        float* rope = args.rope.Row<float>(i);
        if (place.row >= 0) {
          RoundThrough(args.local_latent.Row<float>(place.row), width, latent_plane.dtype, latent);
          RoundThrough(args.local_rope.Row<float>(place.row), rope_width, rope_plane.dtype, rope);
        } else if (place.slot >= 0) {
          LoadFloats(TokenAt(latent_plane, place.slot, place.offset, width), width,
                     latent_plane.dtype, latent);
          LoadFloats(TokenAt(rope_plane, place.slot, place.offset, rope_width), rope_width,
                     rope_plane.dtype, rope);
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
