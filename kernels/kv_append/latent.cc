#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"
#include "kernels/kv_append/latent_append.h"
#include "kernels/kv_append/latent_gather.h"

namespace heddle {

absl::Status ValidateLatentAppend(const LatentAppendArgs& args) {
  constexpr char kOp[] = "latent_append";
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "latent", args.latent));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "rope", args.rope));
  RETURN_IF_ERROR(ValidateShape(kOp, "rope", args.rope, args.latent.rows, args.rope.cols));
  RETURN_IF_ERROR(ValidateKvPlane(kOp, "latent_plane", args.latent_plane,
                                  {1, args.latent.cols, args.page_size}));
  RETURN_IF_ERROR(
      ValidateKvPlane(kOp, "rope_plane", args.rope_plane, {1, args.rope.cols, args.page_size}));
  RETURN_IF_ERROR(ValidateArray(kOp, "slots", args.slots, args.latent.rows));
  return ValidateArray(kOp, "page_offsets", args.page_offsets, args.latent.rows);
}

absl::Status ValidateLatentGather(const LatentGatherArgs& args) {
  constexpr char kOp[] = "latent_gather";
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "local_latent", args.local_latent));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "local_rope", args.local_rope));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "latent", args.latent));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "rope", args.rope));
  RETURN_IF_ERROR(ValidateShape(kOp, "rope", args.rope, args.latent.rows, args.rope.cols));
  RETURN_IF_ERROR(ValidateShape(kOp, "local_latent", args.local_latent, args.local_latent.rows,
                                args.latent.cols));
  RETURN_IF_ERROR(
      ValidateShape(kOp, "local_rope", args.local_rope, args.local_latent.rows, args.rope.cols));
  const PagedLatentView& pages = args.pages;
  if (pages.latent.data != nullptr || pages.rope.data != nullptr) {
    RETURN_IF_ERROR(
        ValidateKvPlane(kOp, "pages.latent", pages.latent, {1, args.latent.cols, pages.page_size}));
    RETURN_IF_ERROR(
        ValidateKvPlane(kOp, "pages.rope", pages.rope, {1, args.rope.cols, pages.page_size}));
    RETURN_IF_ERROR(ValidateArray(kOp, "page_starts", pages.page_starts, args.num_sequences));
  }
  RETURN_IF_ERROR(ValidateArray(kOp, "query_starts", args.query_starts, args.num_sequences));
  RETURN_IF_ERROR(ValidateArray(kOp, "positions", args.positions, args.local_latent.rows));
  RETURN_IF_ERROR(ValidateArray(kOp, "segment_starts", args.segment_starts, args.num_sequences));
  return ValidateArray(kOp, "segment_positions", args.segment_positions, args.num_sequences);
}

}  // namespace heddle
