// Chooses the next tokens from logits that are sharded over the vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "parallel/communicator.h"
#include "parallel/shard_spec.h"
#include "runtime/sampling/logit_exchange.h"
#include "runtime/sampling/row_facts.h"
#include "runtime/sampling/sampled_token.h"
#include "runtime/sampling/sequence_state.h"

namespace heddle {

// The same on every rank.
struct SamplerOptions {
  int64_t vocab_size = 0;           // columns of the logits, over all ranks
  std::vector<Range> vocab_shards;  // [ranks] ids of each, ascending; empty ones are legal
  int64_t num_sampled_ids = 0;      // ids from here on pad the table: never sampled. 0: none do
  std::vector<int32_t> eos_token_ids;
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

  // `logits` [rows, local vocabulary] may still be in the making on `stream`, which is
  // synchronised. Row i belongs to `sequences[i]`. Collective: every rank passes the same
  // sequences. An error is one of the device or of a peer, not of a row.
  absl::StatusOr<std::vector<SampledToken>> Sample(ConstMatrixView logits,
                                                   std::span<const SequenceState* const> sequences,
                                                   Stream& stream);

 private:
  Sampler(LogitExchange exchange, RowContext context);

  int num_ranks() const { return exchange_.num_ranks(); }
  // Whether a row can be decided from what each rank tells of its slice, at least as a rule.
  bool RecordsMaySuffice(const RowNeeds& needs) const;
  // [row * ranks + rank] of all ranks' records on the rows, which are empty for rows without needs.
  // Valid until the next gathering.
  absl::StatusOr<std::vector<const std::byte*>> GatherRecords(
      ConstMatrixView logits, std::span<const SequenceState* const> sequences,
      std::span<const std::optional<RowNeeds>> needs, Stream& stream);
  SampledToken ChooseFromWholeRow(std::span<const float> logits,
                                  const SequenceState& sequence) const;

  LogitExchange exchange_;
  const RowContext context_;
  const bool blocks_are_whole_;
};

}  // namespace heddle
