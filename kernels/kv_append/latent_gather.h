// A piece of the latents and rotated keys of sequences in dense memory, for MLA's expanded prefill.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// Rows [segment_starts[s], segment_starts[s + 1]) are the positions of sequence s from
// segment_positions[s] on. From the sequence's first query of the step on they are the step's own
// rows, rounded as their pages round; before, they come from the pages. What is in neither, or in
// another rank's page, is zeros.
struct LatentGatherArgs {
  PagedLatentView pages;         // planes without data: there is no cache
  ConstMatrixView local_latent;  // [tokens, kv_lora_rank], normed
  ConstMatrixView local_rope;    // [tokens, rope_dim], rotated
  int64_t num_sequences = 0;
  const int32_t* query_starts = nullptr;       // [num_sequences + 1], device, into the tokens
  const int32_t* positions = nullptr;          // [tokens], device
  const int32_t* segment_starts = nullptr;     // [num_sequences + 1], device, into the rows
  const int32_t* segment_positions = nullptr;  // [num_sequences], device
  MatrixView latent;                           // [rows, kv_lora_rank]
  MatrixView rope;                             // [rows, rope_dim]
};

absl::Status ValidateLatentGather(const LatentGatherArgs& args);
using LatentGatherFn = absl::Status (*)(const LatentGatherArgs& args, Stream& stream);

}  // namespace heddle
