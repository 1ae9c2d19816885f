// Intermediate results of the forward pass.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "runtime/model/weights.h"

namespace heddle {

// A float32 matrix with room for the largest step.
class Activation {
 public:
  Activation() = default;
  static absl::StatusOr<Activation> Create(int64_t max_rows, int64_t cols, Backend& backend);

  // The first `rows` rows, dense.
  MatrixView Rows(int64_t rows) const { return FloatMatrix(buffer_.as<float>(), rows, cols_); }

 private:
  int64_t cols_ = 0;
  DeviceBuffer buffer_;
};

// Sees a named activation once it has been enqueued; may be empty.
using Tap = std::function<absl::Status(absl::string_view name, ConstMatrixView value)>;

// out = x W^T + b. `precision` is for block-quantised weights; the others are multiplied exactly.
absl::Status Project(ConstMatrixView x, const Projection& projection, MatrixView out,
                     ActivationPrecision precision, const KernelTable& kernels, Stream& stream);

}  // namespace heddle
