// The forward pass of one rank: token ids in, its shard of the logits out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "kernels/paged_kv_view.h"
#include "parallel/communicator.h"
#include "runtime/model/model_spec.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/weights.h"
#include "runtime/shard_layout.h"

namespace heddle {

// The planes of one layer in this rank's page pool.
struct LayerCache {
  KvPlane k;  // [slots, kv_heads, head_dim, page_size]
  KvPlane v;  // [slots, kv_heads, page_size, head_dim]
};

// One per layer; the memory is the page pool's. Without one the decoder attends over the step's own
// tokens, each sequence whole.
struct DecoderCache {
  int64_t page_size = 0;
  std::vector<LayerCache> layers;  // [num_layers]
};

struct DecoderOptions {
  StepLimits limits;
  int64_t max_model_len = 0;                                      // positions of the rotary table
  ActivationPrecision precision = ActivationPrecision::kFloat32;  // for block-quantised weights
  std::optional<DecoderCache> cache;
  // Called on the worker thread after each layer has been enqueued: progress for the deadline.
  std::function<void()> on_layer;
  // For tests and debugging: called with each named activation of each layer when it has been
  // enqueued ("layers.0.attention", ...). Read it after a synchronisation, before the next op.
  std::function<absl::Status(absl::string_view name, ConstMatrixView value)> tap;
};

// Ranks with empty shares of heads, columns or ids run the same code and join every AllReduce with
// zeros. Everything that varies between steps of one shape is read from device buffers at fixed
// addresses, and nothing is read back: the ops of a step may run as late as the next
// synchronisation.
//
// Owned by one rank's worker and used from its thread. Activations are allocated once.
class Decoder {
 public:
  // The references outlive the decoder. Unimplemented if the backend lacks an op, with its name.
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(const ModelSpec& spec,
                                                         const ShardLayout& layout, int rank,
                                                         const ModelWeights& weights,
                                                         DecoderOptions options, Backend& backend,
                                                         Communicator& communicator);
  virtual ~Decoder() = default;

  // Enqueues a step up to the last layer's hidden states, kept until the next Forward. Collective.
  virtual absl::Status Forward(const StepInputs& inputs, const StepShape& shape,
                               Stream& stream) = 0;

  // Enqueues final norm and head for `num_rows` (at most max_logit_rows) tokens of the last
  // Forward, named by `rows` [num_rows] on the device, so that the logits of a long prompt can be
  // had in pieces. The view [num_rows, local vocabulary] float32 is overwritten by the next call.
  virtual absl::StatusOr<ConstMatrixView> Logits(const int32_t* rows, int64_t num_rows,
                                                 Stream& stream) = 0;
};

}  // namespace heddle
