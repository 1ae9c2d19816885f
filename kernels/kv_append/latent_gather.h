// A piece of a sequence's latents and rotated keys in dense memory, for MLA's expanded prefill.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// Row i comes from a page of this rank (slots[i] >= 0), else from row local_rows[i] >= 0 of the
// step's own tokens, rounded as its page would, else it is zeros, for another rank to fill.
struct LatentGatherArgs {
  KvPlane latent_plane;  // [slots, page_size, kv_lora_rank]
  KvPlane rope_plane;    // [slots, page_size, rope_dim]
  int64_t page_size = 0;
  ConstMatrixView local_latent;           // [tokens, kv_lora_rank], normed
  ConstMatrixView local_rope;             // [tokens, rope_dim], rotated
  const int32_t* slots = nullptr;         // [n], device
  const int32_t* page_offsets = nullptr;  // [n], device: index inside the page
  const int32_t* local_rows = nullptr;    // [n], device
  MatrixView latent;                      // [n, kv_lora_rank]
  MatrixView rope;                        // [n, rope_dim]
};

absl::Status ValidateLatentGather(const LatentGatherArgs& args);
using LatentGatherFn = absl::Status (*)(const LatentGatherArgs& args, Stream& stream);

}  // namespace heddle
