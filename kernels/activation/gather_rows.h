// out[i] = x[rows[i]]: picks the tokens whose logits are wanted.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

struct GatherRowsArgs {
  ConstMatrixView x;              // [tokens, width]
  const int32_t* rows = nullptr;  // [out.rows], device, each < x.rows
  MatrixView out;                 // [num_rows, width]
};

absl::Status ValidateGatherRows(const GatherRowsArgs& args);
using GatherRowsFn = absl::Status (*)(const GatherRowsArgs& args, Stream& stream);

}  // namespace heddle
