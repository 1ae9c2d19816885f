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

namespace heddle {

struct ScoredRows {
  std::vector<float> logprobs;  // [rows], on every rank; NaN where a row's logits are not finite
  std::vector<float> logits;    // [rows, vocab_size] on rank 0 if asked for, else empty
};

// The log-sum-exp is summed in the same order at every rank count: equal logits give equal bits.
// Owned by one rank and called from its worker thread.
class PromptScorer {
 public:
  // `vocab_shards` [ranks] are the ids of each rank. The references outlive the scorer.
  static absl::StatusOr<std::unique_ptr<PromptScorer>> Create(std::vector<Range> vocab_shards,
                                                              Backend& backend,
                                                              Communicator& communicator);
  virtual ~PromptScorer() = default;

  // `logits` [rows, local vocabulary] may still be in the making on `stream`, which is
  // synchronised. targets[i] is the token whose log-probability row i gives; -1: none wanted.
  // Collective.
  virtual absl::StatusOr<ScoredRows> Score(ConstMatrixView logits, std::span<const int32_t> targets,
                                           bool want_logits, Stream& stream) = 0;
};

}  // namespace heddle
