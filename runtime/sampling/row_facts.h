// What sampling needs to know of one row of logits, gathered from the ranks that hold its slices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "parallel/shard_spec.h"
#include "runtime/sampling/row_choice.h"
#include "runtime/sampling/row_sums.h"
#include "runtime/sampling/sampled_token.h"
#include "runtime/sampling/sequence_state.h"

namespace heddle {

// Which facts a row's parameters call for. Equal on all ranks, so that each knows the length of the
// others' records.
struct RowNeeds {
  int64_t candidates = 0;    // of a filtered row, from each rank
  bool sums = false;         // denominator of a top-p on the whole distribution
  int64_t top_logprobs = 0;  // most likely tokens of the raw distribution, from each rank
  bool raw_sums = false;     // denominator of the raw distribution
};
RowNeeds NeedsOf(const SamplingParams& params, int64_t max_candidates);

// Facts of one rank's slice, of all slices merged, or of a row that is at hand as a whole.
struct RowFacts {
  int32_t bad_id = -1;  // of the first raw logit that is NaN or infinite; the rest is unset then
  float bad_logit = 0.0f;
  // The winner of a row without filters; its raw logit.
  ScoredToken best;
  float best_raw_logit = 0.0f;
  // The head of the adjusted row (RankedRow), and its blocks of exp(logit / temperature).
  std::vector<Candidate> candidates;
  bool complete = true;
  std::vector<BlockSum> blocks;
  std::vector<Candidate> top_logprobs;  // of the raw row; with their raw logits
  std::vector<BlockSum> raw_blocks;
};

// The same for all rows of a model.
struct RowContext {
  int64_t num_sampled_ids = 0;  // ids from here on are masked
  std::vector<int32_t> eos_token_ids;
};

// `logits` are the raw ones of the ids [ids.begin, ids.end).
RowFacts FactsOf(std::span<const float> logits, Range ids, const SequenceState& sequence,
                 const RowNeeds& needs, const RowContext& context);

// Facts as a record of a length that `needs` and the slice's ids determine.
int64_t RecordBytes(const RowNeeds& needs, Range ids);
void AppendRecord(const RowFacts& facts, const RowNeeds& needs, Range ids,
                  std::vector<std::byte>& out);
// Of one row: records[r] is rank r's, whose ids are shards[r].
RowFacts MergeRecords(std::span<const std::byte* const> records, std::span<const Range> shards,
                      const RowNeeds& needs);

// Nullopt if the candidates do not suffice: the whole row is needed.
std::optional<SampledToken> ChooseToken(const RowFacts& facts, const SequenceState& sequence);

}  // namespace heddle
