// The forward pass of one rank: token ids in, its shard of the logits out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/page_pool.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "parallel/communicator.h"
#include "runtime/model/activation.h"
#include "runtime/model/dense_ffn.h"
#include "runtime/model/expert_exchange.h"
#include "runtime/model/gqa_attention.h"
#include "runtime/model/mla_attention.h"
#include "runtime/model/model_spec.h"
#include "runtime/model/moe_ffn.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/weights.h"
#include "runtime/shard_layout.h"

namespace heddle {

struct DecoderOptions {
  StepLimits limits;
  int64_t max_model_len = 0;                                      // positions of the rotary table
  ActivationPrecision precision = ActivationPrecision::kFloat32;  // for block-quantised weights
  // Where keys and values are kept. Null: no cache; the decoder then attends over the step's own
  // tokens, each sequence whole.
  const PagePool* pool = nullptr;
  // Called on the worker thread after each layer has been enqueued: progress for the deadline.
  std::function<void()> on_layer = nullptr;
  // For tests and debugging: called with activations of each layer once they have been enqueued,
  // e.g. "layers.0.attended". It may synchronise the stream to read them.
  Tap tap = nullptr;
};

// Ranks with empty shares of heads, columns or ids run the same code and join every AllReduce with
// zeros. With data-parallel attention a rank computes norms and attention of its own tokens alone;
// those of all ranks are gathered for the feed-forward block, of which each rank has a share, and
// its sums scattered; or, in layers with experts, tokens travel to their experts alone. Everything
// that varies between steps of one shape is read from device buffers at fixed addresses, and
// nothing is read back (but by an ExpertExchange, which must know where tokens go): the ops of a
// step may run as late as the next synchronisation.
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

  // Enqueues a step up to the last layer's hidden states, kept until the next Forward. Collective.
  absl::Status Forward(const StepInputs& inputs, const StepShape& shape, Stream& stream);

  // Enqueues final norm and head for `num_rows` (at most max_logit_rows) tokens of the last
  // Forward, named by `rows` [num_rows] on the device, so that the logits of a long prompt can be
  // had in pieces. The view [num_rows, local vocabulary] float32 is overwritten by the next call.
  absl::StatusOr<ConstMatrixView> Logits(const int32_t* rows, int64_t num_rows, Stream& stream);

 private:
  using AttentionBlock = std::variant<GqaAttentionBlock, MlaAttentionBlock>;

  Decoder(const ModelSpec& spec, const RankLayout& layout, const ModelWeights& weights,
          DecoderOptions options, AttentionBlock attention, DenseFfnBlock dense_ffn,
          std::optional<MoeFfnBlock> moe_ffn, Backend& backend, Communicator& communicator);

  // [own tokens, hidden] of a [tokens, hidden] matrix.
  MatrixView OwnRows(const Activation& x, const StepShape& shape) const;
  // Sums the ranks' summands, in the same order everywhere: every rank gets the sums of its own
  // tokens, which without data-parallel attention are all of them.
  absl::Status SumOverRanks(const Activation& partial, const StepShape& shape, Stream& stream);
  // Completes the rows of this rank's own tokens with those of the others.
  absl::Status GatherTokens(const Activation& x, const StepShape& shape, Stream& stream);
  absl::Status Norm(ConstMatrixView x, const float* weight, MatrixView out, Stream& stream);
  // Fills `out` with this rank's summand; of data-parallel attention that is all.
  absl::Status Attend(int64_t layer, const StepInputs& inputs, const StepShape& shape,
                      ConstMatrixView x, MatrixView out, Stream& stream);
  // Fills the own rows of partial_ from those of normed_.
  absl::Status FeedForward(int64_t layer, const StepShape& shape, Stream& stream);
  absl::Status RunLayer(int64_t layer, const StepInputs& inputs, const StepShape& shape,
                        Stream& stream);

  const ModelSpec& spec_;
  const RankLayout& layout_;
  const ModelWeights& weights_;
  const DecoderOptions options_;
  const KernelTable& kernels_;
  Communicator& communicator_;
  AttentionBlock attention_;
  DenseFfnBlock dense_ffn_;                   // of the dense layers, and of shared experts
  std::optional<MoeFfnBlock> moe_ffn_;        // of the layers with experts
  std::unique_ptr<ExpertExchange> exchange_;  // if tokens travel to their experts; else null

  int64_t num_tokens_ = 0;  // of the last Forward
  // With data-parallel attention only the rows of own tokens are kept up through the layers.
  Activation hidden_;       // [tokens, hidden], the residual stream
  Activation normed_;       // [tokens, hidden]
  Activation partial_;      // [tokens, hidden], a block's output
  Activation last_hidden_;  // [logit rows, hidden]
  Activation logits_;       // [logit rows, local vocabulary]
};

}  // namespace heddle
