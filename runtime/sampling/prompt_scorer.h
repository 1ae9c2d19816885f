// Log-probabilities of given tokens, and whole rows of logits, from a sharded vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "parallel/communicator.h"
#include "parallel/shard_spec.h"
#include "runtime/sampling/logit_exchange.h"

namespace heddle {

// Filled on rank 0, empty elsewhere.
struct ScoredRows {
  std::vector<float> logprobs;  // [rows]; NaN where a row's logits are not finite
  std::vector<float> logits;    // [rows, vocab_size] if asked for
};

// Gathers rows to rank 0, a few at a time, and normalises them there. The log-sum-exp is summed in
// the sampler's order: given equal logits it has equal bits at every rank count.
//
// Owned by one rank and called from its worker thread.
class PromptScorer {
 public:
  // `vocab_shards` [ranks] are the ids of each rank. The references outlive the scorer.
  static absl::StatusOr<std::unique_ptr<PromptScorer>> Create(std::vector<Range> vocab_shards,
                                                              Backend& backend,
                                                              Communicator& communicator);

  // `logits` [rows, local vocabulary] may still be in the making on `stream`, which is
  // synchronised. targets[i] is the token whose log-probability row i gives; -1 gives 0.
  // Collective: every rank passes the same targets.
  absl::StatusOr<ScoredRows> Score(ConstMatrixView logits, std::span<const int32_t> targets,
                                   bool want_logits, Stream& stream);

 private:
  PromptScorer(LogitExchange exchange, bool is_root)
      : exchange_(std::move(exchange)), is_root_(is_root) {}

  LogitExchange exchange_;
  bool is_root_;
};

}  // namespace heddle
