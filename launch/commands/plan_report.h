// What plan has found out, as a text for people or as JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/cost_model.h"
#include "runtime/device_table.h"
#include "runtime/shard_layout.h"
#include "runtime/stripe_choice.h"

namespace heddle {

// A way to hold the cache.
struct PlacementPlan {
  std::string name;  // "replicated", "4 stripes", ...
  Placement placement;
  double weight_bytes = 0;      // of the fullest rank
  int64_t capacity_tokens = 0;  // of all ranks; 0: the weights alone do not fit
};

struct Plan {
  std::string model_path;
  bool bare_config = false;  // there are no weights
  ModelCosts model;
  DeviceFigures device;
  ShardLayoutOptions layout;  // as asked for; `placements` are all that can run
  double memory_bytes = 0;    // of a rank, for weights and cache

  std::vector<PlacementPlan> placements;  // by stripes, and data-parallel attention last
  int64_t compute_bound_batch = 0;        // of the linear layers
  ExpectedLoad load;
  StripeChoice choice;
  PlacementPlan chosen;      // of `placements`: so many stripes, or DP attention if asked for
  std::string does_not_fit;  // why, and what would; empty if it does

  // Decode steps to predict: every size with every length.
  std::vector<int64_t> batch_sizes;
  std::vector<int64_t> context_lens;
};

// Both end in a newline.
std::string PlanAsText(const Plan& plan);
std::string PlanAsJson(const Plan& plan);

}  // namespace heddle
