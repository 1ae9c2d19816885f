// MLA's expanded attention: a piece of the context, expanded by kv_b to keys and values of every
// head, is folded into the running softmax of the step's queries. Pieces bound the memory.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

// A query at position p sees the piece's keys at positions q <= p. Pieces of a sequence are passed
// in ascending order and begin at multiples of kMlaPieceAlignment, at which the keys of a piece are
// cut into blocks; blocks are folded in ascending order, so neither pieces nor chunks of a prompt
// nor batch mates change a row's bits. Masked keys never enter arithmetic.
inline constexpr int64_t kMlaPieceAlignment = 64;

struct MlaPrefillArgs {
  ConstHeadsView q;         // [tokens, heads, nope_dim + rope_dim], rotated
  ConstHeadsView expanded;  // [piece_tokens, heads, nope_dim + v_dim]: keys' nope part, then values
  ConstMatrixView k_rope;   // [piece_tokens, rope_dim], rotated
  int64_t num_sequences = 0;
  const int32_t* segment_starts = nullptr;  // [num_sequences + 1], device, into the piece's tokens
  const int32_t* segment_first_positions = nullptr;  // [num_sequences], device
  const int32_t* query_starts = nullptr;             // [num_sequences + 1], device, into the tokens
  const int32_t* positions = nullptr;                // [tokens], device
  float scale = 1.0f;
  // The running state, written by each piece and read by the next.
  float* maximum = nullptr;  // [tokens, heads]
  float* sum = nullptr;      // [tokens, heads]
  HeadsView out;             // [tokens, heads, v_dim], not yet divided by the sum
  bool first = true;         // begins with the state of having seen nothing
  bool last = true;          // divides; a query that has seen nothing gives zeros
};

absl::Status ValidateMlaPrefill(const MlaPrefillArgs& args);
using MlaPrefillFn = absl::Status (*)(const MlaPrefillArgs& args, Stream& stream);

}  // namespace heddle
