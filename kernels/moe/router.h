// Which experts each token goes to, and how much each of them counts.
//
// The rules of Mixtral, Qwen3-MoE, DeepSeek-V2 (one group or group-limited, section 2.1.2 of its
// report) and DeepSeek-V3 (section 2.1.2, with the correction bias of auxiliary-loss-free
// balancing).
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

// How logits become scores, in float32.
enum class RouterScore { kSoftmax, kSigmoid };

// What a group of experts is chosen by: its best biased score, or the sum of its two best.
enum class GroupScore { kMax, kTopTwoSum };

// Experts are chosen by score + bias: first the best `num_top_groups` groups of consecutive
// experts, then the best `top_k` experts of those groups; the others do not take part. Ties go to
// the lowest id. The bias has no other effect: weights are
//   score / (sum of the chosen scores + 1e-20, if normalise_weights) * scaling_factor.
//
// A NaN counts as the highest score and makes its weight NaN, so that a bad row fails alone, with
// ids that are in range and differ.
struct RouterArgs {
  ConstMatrixView logits;  // [tokens, experts]
  RouterScore score = RouterScore::kSoftmax;
  const float* correction_bias = nullptr;  // [experts], or null
  int64_t num_groups = 1;                  // divides the number of experts
  int64_t num_top_groups = 1;
  GroupScore group_score = GroupScore::kMax;
  int64_t top_k = 1;
  bool normalise_weights = false;
  float scaling_factor = 1.0f;
  int32_t* expert_ids = nullptr;    // [tokens, top_k], best first
  float* expert_weights = nullptr;  // [tokens, top_k]
};

absl::Status ValidateRouter(const RouterArgs& args);
using RouterFn = absl::Status (*)(const RouterArgs& args, Stream& stream);

}  // namespace heddle
