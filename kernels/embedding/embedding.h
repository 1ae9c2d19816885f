// Rows of an embedding table, widened to the activations' type.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

// The table is a vocabulary shard [first_id, first_id + table.n); an id outside it gives a row of
// zeros, so that summing over the ranks gives the whole embedding.
struct EmbeddingArgs {
  PackedWeight table;                  // [local_vocab, width]
  const int32_t* token_ids = nullptr;  // [tokens], device
  int64_t first_id = 0;
  MatrixView out;  // [tokens, width]
};

absl::Status ValidateEmbedding(const EmbeddingArgs& args);
using EmbeddingFn = absl::Status (*)(const EmbeddingArgs& args, Stream& stream);

}  // namespace heddle
