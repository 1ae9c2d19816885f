// Stores the step's latents and rotated keys of MLA in their pages.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

struct LatentAppendArgs {
  ConstMatrixView latent;  // [tokens, kv_lora_rank], normed
  ConstMatrixView rope;    // [tokens, rope_dim], rotated
  KvPlane latent_plane;    // [slots, page_size, kv_lora_rank]
  KvPlane rope_plane;      // [slots, page_size, rope_dim]
  int64_t page_size = 0;
  const int32_t* slots = nullptr;         // [tokens], device; -1: this rank stores nothing
  const int32_t* page_offsets = nullptr;  // [tokens], device: index inside the page
};

absl::Status ValidateLatentAppend(const LatentAppendArgs& args);
using LatentAppendFn = absl::Status (*)(const LatentAppendArgs& args, Stream& stream);

}  // namespace heddle
