#include "runtime/sampling/sequence_state.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/base/logging.h"

namespace heddle {

SequenceState::SequenceState(SamplingParams params, uint64_t seed, std::vector<int32_t> token_ids,
                             int64_t prompt_length)
    : params_(std::move(params)),
      seed_(seed),
      prompt_length_(prompt_length),
      token_ids_(std::move(token_ids)) {
  CHECK(prompt_length_ >= 0 && prompt_length_ <= position())
      << prompt_length_ << " of " << position();
  if (!params_.HasPenalties()) return;
  for (int64_t i = 0; i < position(); ++i) {
    output_counts_[token_ids_[i]] += i >= prompt_length_ ? 1 : 0;
  }
}

void SequenceState::Append(int32_t token_id) {
  token_ids_.push_back(token_id);
  if (params_.HasPenalties()) ++output_counts_[token_id];
}

void SequenceState::AdjustLogits(std::span<float> logits, Range ids,
                                 std::span<const int32_t> eos_token_ids) const {
  for (const auto& [id, count] : output_counts_) {
    if (!ids.Contains(id)) continue;
    float& logit = logits[id - ids.begin];
    double value = logit;
    value = value > 0.0 ? value / params_.repetition_penalty : value * params_.repetition_penalty;
    value -= params_.frequency_penalty * count;
    if (count > 0) value -= params_.presence_penalty;
    // Stays finite: only what is masked may be infinite.
    constexpr double kMax = std::numeric_limits<float>::max();
    logit = static_cast<float>(std::clamp(value, -kMax, kMax));
  }
  if (!BelowMinTokens()) return;
  const auto mask = [&](std::span<const int32_t> stops) {
    for (const int32_t id : stops) {
      if (ids.Contains(id)) logits[id - ids.begin] = -std::numeric_limits<float>::infinity();
    }
  };
  mask(params_.stop_token_ids);
  if (!params_.ignore_eos) mask(eos_token_ids);
}

}  // namespace heddle
