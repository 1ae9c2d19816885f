// Chooses the next tokens from logits that are sharded over the vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "parallel/communicator.h"
#include "parallel/shard_spec.h"
#include "runtime/sampling/sequence_state.h"
#include "runtime/sampling/token_logprob.h"

namespace heddle {

// The same on every rank.
struct SamplerOptions {
  int64_t vocab_size = 0;           // columns of the logits, over all ranks
  std::vector<Range> vocab_shards;  // [ranks] ids of each, ascending; empty ones are legal
  int64_t num_sampled_ids = 0;      // ids from here on pad the table: never sampled. 0: none do
  std::vector<int32_t> eos_token_ids;
};

// The outcome for one row; equal on every rank.
struct SampledToken {
  absl::Status status;  // why this row has no token; batch mates are not affected
  int32_t token_id = -1;
  // If the row's parameters ask for log-probabilities: the token's, and those of the most likely
  // tokens (ties: lowest id first).
  float logprob = 0.0f;
  std::vector<TokenLogprob> top_logprobs;
};

// Order: penalties, min-tokens mask, temperature, min-p, top-k, top-p on the renormalised rest.
// Among the tokens that are left the choice is the argmax of logit / temperature + Gumbel noise
// that is a function of (seed, position, token id). Greedy rows take the argmax. Ties go to the
// lowest id. Given equal logits, tokens and log-probabilities have equal bits at every rank count.
//
// A row costs one small exchange if it is greedy, of plain temperature, or if its filters keep
// nothing outside the best 256 tokens of each rank; else its full logits are gathered.
//
// Owned by one rank and called from its worker thread.
class Sampler {
 public:
  // `backend` and `communicator` outlive the sampler.
  static absl::StatusOr<std::unique_ptr<Sampler>> Create(SamplerOptions options, Backend& backend,
                                                         Communicator& communicator);
  virtual ~Sampler() = default;

  // `logits` [rows, local vocabulary] may still be in the making on `stream`, which is
  // synchronised. Row i belongs to `sequences[i]`. Collective: every rank passes the same
  // sequences. An error is one of the device or of a peer, not of a row.
  virtual absl::StatusOr<std::vector<SampledToken>> Sample(
      ConstMatrixView logits, std::span<const SequenceState* const> sequences, Stream& stream) = 0;
};

}  // namespace heddle
