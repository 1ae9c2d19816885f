// What sampling must know of one sequence: its parameters, its tokens and how often each occurred.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "parallel/shard_spec.h"
#include "runtime/sampling/sampling_params.h"

namespace heddle {

// Every rank keeps one for each slot of the persistent batch, built from the same admission and fed
// with the same tokens, so that all of them hold equal contents. Rebuilding it from the tokens
// after a preemption gives the same state. Used by the rank's worker thread.
class SequenceState {
 public:
  // `token_ids` are prompt and, on resume, output so far; each is below the vocabulary's size.
  SequenceState(SamplingParams params, uint64_t seed, std::vector<int32_t> token_ids,
                int64_t prompt_length);

  void Append(int32_t token_id);

  const SamplingParams& params() const { return params_; }
  uint64_t seed() const { return seed_; }
  std::span<const int32_t> token_ids() const { return token_ids_; }
  int64_t prompt_length() const { return prompt_length_; }
  // Of the token that is sampled next.
  int64_t position() const { return static_cast<int64_t>(token_ids_.size()); }
  int64_t num_output_tokens() const { return position() - prompt_length_; }

  // Whether `AdjustLogits` would change anything.
  bool AdjustsLogits() const { return params_.HasPenalties() || BelowMinTokens(); }
  // Applies the penalties, then masks with -infinity what would end the sequence before its
  // min_tokens: its stop tokens and, unless ignored, `eos_token_ids`. `logits` are those of the
  // ids [ids.begin, ids.end).
  void AdjustLogits(std::span<float> logits, Range ids,
                    std::span<const int32_t> eos_token_ids) const;

 private:
  bool BelowMinTokens() const { return num_output_tokens() < params_.min_tokens; }

  SamplingParams params_;
  uint64_t seed_;
  int64_t prompt_length_;
  std::vector<int32_t> token_ids_;
  // Of every token seen: how often in the output (0: in the prompt only). Kept only for sequences
  // with penalties.
  absl::flat_hash_map<int32_t, int32_t> output_counts_;
};

}  // namespace heddle
