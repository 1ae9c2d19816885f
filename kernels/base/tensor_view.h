// Matrices in device memory that an op reads or writes. They own nothing.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace heddle {

// [rows, cols], rows `row_stride` elements apart.
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  template <typename T>
  T* Row(int64_t row) const {
    return static_cast<T*>(data) + row * row_stride;
  }
};

struct ConstMatrixView {
  ConstMatrixView() = default;
  ConstMatrixView(const MatrixView& m)  // NOLINT(google-explicit-constructor): as const T* from T*
      : data(m.data), dtype(m.dtype), rows(m.rows), cols(m.cols), row_stride(m.row_stride) {}
  ConstMatrixView(const void* data_in, DType dtype_in, int64_t rows_in, int64_t cols_in,
                  int64_t row_stride_in)
      : data(data_in), dtype(dtype_in), rows(rows_in), cols(cols_in), row_stride(row_stride_in) {}

  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  template <typename T>
  const T* Row(int64_t row) const {
    return static_cast<const T*>(data) + row * row_stride;
  }
};

// A dense [rows, cols] float32 matrix.
inline MatrixView FloatMatrix(float* data, int64_t rows, int64_t cols) {
  return {data, DType::kFloat32, rows, cols, cols};
}
inline ConstMatrixView FloatMatrix(const float* data, int64_t rows, int64_t cols) {
  return {data, DType::kFloat32, rows, cols, cols};
}

}  // namespace heddle
