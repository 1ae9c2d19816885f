// The gated feed-forward block of a Llama-like layer on one rank's columns.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "runtime/model/activation.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/weights.h"

namespace heddle {

// Owned by the decoder, used for each of its layers in turn.
class DenseFfnBlock {
 public:
  // `max_columns` is the most that any layer holds here.
  static absl::StatusOr<DenseFfnBlock> Create(int64_t max_columns, const StepLimits& limits,
                                              ActivationPrecision precision, Backend& backend);

  // x [tokens, hidden] is normed. `out` [tokens, hidden] receives this rank's summand: zeros, or a
  // bias, from a rank without columns.
  absl::Status Forward(const DenseFfnWeights& weights, ConstMatrixView x, MatrixView out,
                       Stream& stream);

 private:
  DenseFfnBlock(ActivationPrecision precision, Backend& backend)
      : kernels_(backend.kernels()), precision_(precision) {}

  const KernelTable& kernels_;
  const ActivationPrecision precision_;
  // Room for the widest layer; a layer's rows are dense at its own width.
  DeviceBuffer gate_;  // [tokens, ffn_columns]
  DeviceBuffer up_;    // [tokens, ffn_columns]
};

}  // namespace heddle
