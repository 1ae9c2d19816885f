#include "kernels/attention/mla_prefill.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateMlaPrefill(const MlaPrefillArgs& args) {
  constexpr char kOp[] = "mla_prefill";
  const int64_t tokens = args.q.tokens, heads = args.q.heads;
  RETURN_IF_ERROR(ValidateHeads(kOp, "q", args.q));
  RETURN_IF_ERROR(ValidateHeads(kOp, "expanded", args.expanded));
  RETURN_IF_ERROR(ValidateHeads(kOp, "out", args.out));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "k_rope", args.k_rope));
  const int64_t rope_dim = args.k_rope.cols, v_dim = args.out.dim;
  const int64_t nope_dim = args.q.dim - rope_dim;
  if (nope_dim < 0 || args.q.dim < 1 || v_dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        kOp, ": q has ", args.q.dim, " elements a head, k_rope ", rope_dim, " and out ", v_dim));
  }
  const int64_t piece_tokens = args.expanded.tokens;
  RETURN_IF_ERROR(
      ValidateHeadsShape(kOp, "expanded", args.expanded, piece_tokens, heads, nope_dim + v_dim));
  RETURN_IF_ERROR(ValidateHeadsShape(kOp, "out", args.out, tokens, heads, v_dim));
  RETURN_IF_ERROR(ValidateShape(kOp, "k_rope", args.k_rope, piece_tokens, rope_dim));
  const int64_t num_sequences = tokens > 0 ? args.num_sequences : 0;
  RETURN_IF_ERROR(ValidateArray(kOp, "segment_starts", args.segment_starts, num_sequences));
  RETURN_IF_ERROR(
      ValidateArray(kOp, "segment_first_positions", args.segment_first_positions, num_sequences));
  RETURN_IF_ERROR(ValidateArray(kOp, "query_starts", args.query_starts, num_sequences));
  RETURN_IF_ERROR(ValidateArray(kOp, "positions", args.positions, tokens));
  RETURN_IF_ERROR(ValidateArray(kOp, "maximum", args.maximum, tokens * heads));
  return ValidateArray(kOp, "sum", args.sum, tokens * heads);
}

}  // namespace heddle
