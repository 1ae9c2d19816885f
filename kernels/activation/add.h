// target += x, the residual connection.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

struct AddArgs {
  ConstMatrixView x;  // [tokens, width]
  MatrixView target;  // [tokens, width]
};

absl::Status ValidateAdd(const AddArgs& args);
using AddFn = absl::Status (*)(const AddArgs& args, Stream& stream);

}  // namespace heddle
