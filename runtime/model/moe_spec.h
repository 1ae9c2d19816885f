// A mixture of experts: how many, how wide, in which layers, and how a token's are chosen.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/moe/router.h"

namespace heddle {

// More experts than any real layer and model have, few enough to name every tensor of.
inline constexpr int64_t kMaxExperts = int64_t{1} << 12;
inline constexpr int64_t kMaxExpertsOfAllLayers = int64_t{1} << 17;

// Routing is that of kernels/moe/router.h. Invariants once parsed: at least one layer has experts,
// num_groups divides num_experts, and the chosen groups hold num_experts_per_token experts.
struct MoeSpec {
  int64_t num_experts = 0;  // routed ones
  int64_t num_experts_per_token = 0;
  int64_t expert_intermediate_size = 0;  // of one routed expert
  int64_t shared_intermediate_size = 0;  // of all shared experts together; 0: there are none
  std::vector<bool> layers;              // [num_layers] those with experts; the others are dense

  RouterScore score = RouterScore::kSoftmax;
  bool correction_bias = false;  // added to the scores to choose, never to weigh
  int64_t num_groups = 1;        // of consecutive experts
  int64_t num_top_groups = 1;    // groups that a token's experts may come from
  GroupScore group_score = GroupScore::kMax;
  bool normalise_weights = false;      // the chosen experts' scores are made to sum to 1 …
  double routed_scaling_factor = 1.0;  // … and are then multiplied by this
};

}  // namespace heddle
