#include "kernels/attention/gqa_attention.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {
namespace {

absl::Status ValidateHeads(absl::string_view op, int64_t num_query_heads, int64_t num_kv_heads,
                           int64_t head_dim) {
  if (num_query_heads < 0 || num_kv_heads < 0 || head_dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", num_query_heads, " query heads, ",
                                                   num_kv_heads, " KV heads of ", head_dim,
                                                   " elements"));
  }
  if (num_query_heads > 0 && (num_kv_heads == 0 || num_query_heads % num_kv_heads != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", num_query_heads,
                                                   " query heads are not a multiple of ",
                                                   num_kv_heads, " KV heads"));
  }
  return absl::OkStatus();
}

absl::Status ValidateWindow(absl::string_view op, int64_t window) {
  if (window >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(op, ": window ", window, " is negative"));
}

}  // namespace

absl::Status ValidateGqaAttention(const GqaAttentionArgs& args) {
  constexpr char kOp[] = "gqa_attention";
  const PagedKvView& kv = args.kv;
  RETURN_IF_ERROR(ValidateHeads(kOp, args.num_query_heads, kv.num_kv_heads, kv.head_dim));
  RETURN_IF_ERROR(ValidateWindow(kOp, args.window));
  const KvPlaneShape shape{kv.num_kv_heads, kv.head_dim, kv.page_size};
  RETURN_IF_ERROR(ValidateKvPlane(kOp, "kv.k", kv.k, shape));
  RETURN_IF_ERROR(ValidateKvPlane(kOp, "kv.v", kv.v, shape));
  if (kv.num_kv_heads > 0 && kv.k.dtype != kv.v.dtype) {
    return absl::InvalidArgumentError(absl::StrCat(kOp, ": kv.k is ", DTypeName(kv.k.dtype),
                                                   " but kv.v is ", DTypeName(kv.v.dtype)));
  }
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "q", args.q));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "out", args.out));
  const int64_t width = args.num_query_heads * kv.head_dim;
  RETURN_IF_ERROR(ValidateShape(kOp, "q", args.q, args.q.rows, width));
  RETURN_IF_ERROR(ValidateShape(kOp, "out", args.out, args.q.rows, width));
  const int64_t num_sequences = args.q.rows > 0 ? args.num_sequences : 0;
  RETURN_IF_ERROR(ValidateArray(kOp, "query_starts", args.query_starts, num_sequences));
  RETURN_IF_ERROR(ValidateArray(kOp, "positions", args.positions, args.q.rows));
  return ValidateArray(kOp, "kv.page_starts", kv.page_starts, num_sequences);
}

absl::Status ValidateDenseAttention(const DenseAttentionArgs& args) {
  constexpr char kOp[] = "dense_attention";
  RETURN_IF_ERROR(ValidateHeads(kOp, args.num_query_heads, args.num_kv_heads, args.head_dim));
  RETURN_IF_ERROR(ValidateWindow(kOp, args.window));
  const int64_t q_width = args.num_query_heads * args.head_dim;
  const int64_t kv_width = args.num_kv_heads * args.head_dim;
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "q", args.q));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "k", args.k));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "v", args.v));
  RETURN_IF_ERROR(ValidateFloatMatrix(kOp, "out", args.out));
  RETURN_IF_ERROR(ValidateShape(kOp, "q", args.q, args.q.rows, q_width));
  RETURN_IF_ERROR(ValidateShape(kOp, "k", args.k, args.q.rows, kv_width));
  RETURN_IF_ERROR(ValidateShape(kOp, "v", args.v, args.q.rows, kv_width));
  RETURN_IF_ERROR(ValidateShape(kOp, "out", args.out, args.q.rows, q_width));
  return ValidateArray(kOp, "query_starts", args.query_starts,
                       args.q.rows > 0 ? args.num_sequences : 0);
}

}  // namespace heddle
