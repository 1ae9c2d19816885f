#include "kernels/attention/mla_decode.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateMlaDecode(const MlaDecodeArgs& args) {
  constexpr char kOp[] = "mla_decode";
  const PagedLatentView& kv = args.kv;
  const int64_t tokens = args.q_latent.tokens, heads = args.q_latent.heads;
  RETURN_IF_ERROR(ValidateKvPlane(kOp, "kv.latent", kv.latent, {1, kv.kv_lora_rank, kv.page_size}));
  RETURN_IF_ERROR(ValidateKvPlane(kOp, "kv.rope", kv.rope, {1, kv.rope_dim, kv.page_size}));
  RETURN_IF_ERROR(ValidateHeads(kOp, "q_latent", args.q_latent));
  RETURN_IF_ERROR(ValidateHeads(kOp, "q_rope", args.q_rope));
  RETURN_IF_ERROR(ValidateHeads(kOp, "out", args.out));
  RETURN_IF_ERROR(
      ValidateHeadsShape(kOp, "q_latent", args.q_latent, tokens, heads, kv.kv_lora_rank));
  RETURN_IF_ERROR(ValidateHeadsShape(kOp, "q_rope", args.q_rope, tokens, heads, kv.rope_dim));
  RETURN_IF_ERROR(ValidateHeadsShape(kOp, "out", args.out, tokens, heads, kv.kv_lora_rank));
  const int64_t num_sequences = tokens > 0 ? args.num_sequences : 0;
  RETURN_IF_ERROR(ValidateArray(kOp, "query_starts", args.query_starts, num_sequences));
  RETURN_IF_ERROR(ValidateArray(kOp, "positions", args.positions, tokens));
  return ValidateArray(kOp, "kv.page_starts", kv.page_starts, num_sequences);
}

}  // namespace heddle
