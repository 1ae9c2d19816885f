#include "kernels/base/validate.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {

absl::Status ValidateFloatMatrix(absl::string_view op, absl::string_view name,
                                 const ConstMatrixView& view) {
  if (view.dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", name, " is ", DTypeName(view.dtype), ", not float32"));
  }
  if (view.rows < 0 || view.cols < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", name, " has shape [", view.rows, ", ", view.cols, "]"));
  }
  if (view.rows > 1 && view.row_stride < view.cols) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": rows of ", name, " overlap: stride ",
                                                   view.row_stride, " for ", view.cols,
                                                   " columns"));
  }
  return ValidateArray(op, name, view.data, view.rows * view.cols);
}

absl::Status ValidateShape(absl::string_view op, absl::string_view name,
                           const ConstMatrixView& view, int64_t rows, int64_t cols) {
  if (view.rows != rows || view.cols != cols) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", name, " is [", view.rows, ", ",
                                                   view.cols, "], not [", rows, ", ", cols, "]"));
  }
  return absl::OkStatus();
}

absl::Status ValidateHeads(absl::string_view op, absl::string_view name,
                           const ConstHeadsView& view) {
  if (view.tokens < 0 || view.heads < 0 || view.dim < 0) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", name, " has shape [", view.tokens,
                                                   ", ", view.heads, ", ", view.dim, "]"));
  }
  if (view.tokens == 0 || view.heads == 0 || view.dim == 0) return absl::OkStatus();
  // Either axis may be the outer one, which steps over all of the inner one.
  const auto nested = [&](int64_t inner, int64_t inner_stride, int64_t outer,
                          int64_t outer_stride) {
    const int64_t span = inner > 1 ? (inner - 1) * inner_stride + view.dim : view.dim;
    return (inner <= 1 || inner_stride >= view.dim) && (outer <= 1 || outer_stride >= span);
  };
  if (!nested(view.heads, view.head_stride, view.tokens, view.token_stride) &&
      !nested(view.tokens, view.token_stride, view.heads, view.head_stride)) {
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": rows of ", name, " overlap: strides ", view.token_stride, " and ", view.head_stride,
        " for [", view.tokens, ", ", view.heads, ", ", view.dim, "]"));
  }
  return ValidateArray(op, name, view.data, 1);
}

absl::Status ValidateHeadsShape(absl::string_view op, absl::string_view name,
                                const ConstHeadsView& view, int64_t tokens, int64_t heads,
                                int64_t dim) {
  if (view.tokens == tokens && view.heads == heads && view.dim == dim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(op, ": ", name, " is [", view.tokens, ", ",
                                                 view.heads, ", ", view.dim, "], not [", tokens,
                                                 ", ", heads, ", ", dim, "]"));
}

absl::Status ValidateArray(absl::string_view op, absl::string_view name, const void* pointer,
                           int64_t size) {
  if (size > 0 && pointer == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", name, " is null"));
  }
  return absl::OkStatus();
}

absl::Status ValidateKvPlane(absl::string_view op, absl::string_view name, const KvPlane& plane,
                             const KvPlaneShape& shape) {
  const auto [num_kv_heads, head_dim, page_size] = shape;
  if (num_kv_heads < 0 || head_dim < 1 || page_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", num_kv_heads, " KV heads of ",
                                                   head_dim, " elements in pages of ", page_size,
                                                   " tokens"));
  }
  if (num_kv_heads == 0) return absl::OkStatus();
  if (!IsFloatingPoint(plane.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", name, " is ", DTypeName(plane.dtype),
                                                   ", not float32, bfloat16 or float16"));
  }
  if (plane.head_stride < head_dim * page_size ||
      plane.slot_stride < (num_kv_heads - 1) * plane.head_stride + head_dim * page_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", name, " has head stride ", plane.head_stride, " and slot stride ",
                     plane.slot_stride, ", too small for ", num_kv_heads, " heads of ", head_dim,
                     " x ", page_size, " elements"));
  }
  return ValidateArray(op, name, plane.data, num_kv_heads);
}

}  // namespace heddle
