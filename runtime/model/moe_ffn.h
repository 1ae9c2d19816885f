// The mixture-of-experts block of a layer on one rank's share of the experts.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/gemm/linear.h"
#include "runtime/model/activation.h"
#include "runtime/model/dense_ffn.h"
#include "runtime/model/expert_exchange.h"
#include "runtime/model/moe_spec.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/weights.h"

namespace heddle {

// Router, dispatch, the experts' gated feed-forward blocks, and their weighted sum beside the
// shared experts. The block sees nothing but its weights: whether a rank holds columns of every
// expert or whole experts is the loader's matter. The router runs on every rank, on the same bits.
//
// Owned by the decoder, used for each of its layers in turn. Long steps are worked off in pieces,
// so that activations, of which a token has one per expert, stay small.
class MoeFfnBlock {
 public:
  // `max_columns` is the widest share of one expert that any layer holds here.
  static absl::StatusOr<MoeFfnBlock> Create(const MoeSpec& spec, int64_t hidden_size,
                                            int64_t max_columns, const StepLimits& limits,
                                            ActivationPrecision precision, Backend& backend);

  // x [tokens, hidden] is normed. `out` [tokens, hidden] receives this rank's summand: zeros from a
  // rank without experts or columns. `shared_ffn` lends its activations to the shared experts and
  // has room for their columns.
  absl::Status Forward(const MoeWeights& weights, DenseFfnBlock& shared_ffn, ConstMatrixView x,
                       MatrixView out, Stream& stream);

  // The same where tokens of data-parallel attention travel to their experts alone, and meet the
  // shared ones, of which this rank then has all columns, at home. x [own tokens, hidden] is
  // normed; `out` [own tokens, hidden] receives all there is. tokens_per_rank: own tokens of each.
  absl::Status ForwardExchanged(const MoeWeights& weights, DenseFfnBlock& shared_ffn,
                                ExpertExchange& exchange, ConstMatrixView x,
                                std::span<const int64_t> tokens_per_rank, MatrixView out,
                                Stream& stream);
  // Tokens whose experts are run at once.
  int64_t max_tokens() const { return max_tokens_; }

 private:
  MoeFfnBlock(const MoeSpec& spec, ActivationPrecision precision, Backend& backend)
      : spec_(spec), kernels_(backend.kernels()), precision_(precision) {}

  // The routed experts of at most max_tokens_ tokens; adds to `out`, or fills it.
  absl::Status RunExperts(const MoeWeights& weights, ConstMatrixView x, bool add, MatrixView out,
                          Stream& stream);
  // Sets expert_ids_ and expert_weights_.
  absl::Status Route(const MoeWeights& weights, ConstMatrixView x, Stream& stream);
  // out = x W_e^T for each entry. Without `entry_tokens` entry i multiplies row i.
  absl::Status ProjectEntries(ConstMatrixView x, const int32_t* entry_tokens,
                              const PackedWeightStack& weights, MatrixView out, Stream& stream);

  const MoeSpec spec_;
  const KernelTable& kernels_;
  const ActivationPrecision precision_;
  int64_t max_tokens_ = 0;       // of a piece
  Activation logits_;            // [tokens, experts]
  DeviceBuffer expert_ids_;      // int32 [tokens, top_k]
  DeviceBuffer expert_weights_;  // float [tokens, top_k]
  DeviceBuffer expert_starts_;   // int32 [experts + 1]
  DeviceBuffer entry_tokens_;    // int32 [entries], of which there are tokens * top_k at most
  DeviceBuffer entry_of_;        // int32 [tokens, top_k]
  // Room for the widest layer; a layer's rows are dense at its own width.
  DeviceBuffer gate_;  // [entries, columns]
  DeviceBuffer up_;    // [entries, columns]
  Activation down_;    // [entries, hidden]
};

}  // namespace heddle
