// Rows of a step by token and head, with either axis outermost. They own nothing.
#pragma once

#include <cstdint>

namespace heddle {

// [tokens, heads, dim] float32; strides in elements. The elements of one row lie side by side.
struct HeadsView {
  float* data = nullptr;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  float* At(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

struct ConstHeadsView {
  ConstHeadsView() = default;
  ConstHeadsView(const HeadsView& v)  // NOLINT(google-explicit-constructor): as const T* from T*
      : ConstHeadsView(v.data, v.tokens, v.heads, v.dim, v.token_stride, v.head_stride) {}
  ConstHeadsView(const float* data_in, int64_t tokens_in, int64_t heads_in, int64_t dim_in,
                 int64_t token_stride_in, int64_t head_stride_in)
      : data(data_in),
        tokens(tokens_in),
        heads(heads_in),
        dim(dim_in),
        token_stride(token_stride_in),
        head_stride(head_stride_in) {}

  const float* data = nullptr;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  const float* At(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// Dense memory [tokens, heads, dim], as a projection leaves it.
inline HeadsView TokenMajor(float* data, int64_t tokens, int64_t heads, int64_t dim) {
  return {data, tokens, heads, dim, heads * dim, dim};
}
inline ConstHeadsView TokenMajor(const float* data, int64_t tokens, int64_t heads, int64_t dim) {
  return {data, tokens, heads, dim, heads * dim, dim};
}

// Dense memory [heads, tokens, dim], in which a range of heads is one piece.
inline HeadsView HeadMajor(float* data, int64_t tokens, int64_t heads, int64_t dim) {
  return {data, tokens, heads, dim, dim, tokens * dim};
}
inline ConstHeadsView HeadMajor(const float* data, int64_t tokens, int64_t heads, int64_t dim) {
  return {data, tokens, heads, dim, dim, tokens * dim};
}

}  // namespace heddle
