#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/status_macros.h"
#include "launch/commands/commands.h"
#include "launch/commands/layout_flags.h"
#include "launch/commands/plan_report.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/declared_weights.h"
#include "runtime/cost_model.h"
#include "runtime/device_table.h"
#include "runtime/shard_layout.h"
#include "runtime/stripe_choice.h"

namespace heddle {
namespace {

// A config.json without weights, by its own path or as all there is in a directory.
bool IsBareConfig(const CommandLine& line) {
  namespace fs = std::filesystem;
  if (line.engine.load_format == LoadFormat::kDummy) return true;
  if (line.engine.load_format != LoadFormat::kAuto) return false;
  const fs::path path(line.engine.model);
  if (path.filename() == "config.json") return true;
  std::error_code error;
  if (!fs::exists(path / "config.json", error)) return false;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") return false;
  }
  return true;
}

absl::Status CheckSteps(const Plan& plan) {
  for (const int64_t batch : plan.batch_sizes) {
    if (batch < 1 || batch > kLargestBatch) {
      return absl::InvalidArgumentError(
          absl::StrCat("--batch-size ", batch, ": expected 1 to ", kLargestBatch, " sequences"));
    }
  }
  for (const int64_t context : plan.context_lens) {
    if (context < 1 || context > kLongestContext) {
      return absl::InvalidArgumentError(
          absl::StrCat("--context-len ", context, ": expected 1 to ", kLongestContext, " tokens"));
    }
  }
  if (plan.load.max_num_seqs < 0 || plan.load.max_num_seqs > kLargestBatch) {
    return absl::InvalidArgumentError(absl::StrCat("--max-num-seqs ", plan.load.max_num_seqs,
                                                   ": expected at most ", kLargestBatch));
  }
  return absl::OkStatus();
}

// Every placement that can run.
absl::Status AddPlacements(const ModelSpec& spec, const WeightSource& weights, Plan& plan) {
  ShardLayoutOptions options = plan.layout;
  options.dp_attention = false;
  for (int stripes = 1; stripes <= options.num_ranks; ++stripes) {
    if (options.num_ranks % stripes != 0) continue;
    options.num_stripes = stripes;
    ASSIGN_OR_RETURN(const ShardLayout layout, BuildShardLayout(spec, weights, options));
    const Placement placement = {.num_ranks = options.num_ranks, .num_stripes = stripes};
    plan.placements.push_back({.name = PlacementName(spec, placement),
                               .placement = placement,
                               .weight_bytes = static_cast<double>(layout.MaxWeightBytes()),
                               .capacity_tokens = CapacityTokens(layout, plan.memory_bytes)});
  }
  if (!spec.mla.has_value() || options.num_ranks == 1) return absl::OkStatus();
  options.num_stripes = 1;
  options.dp_attention = true;
  options.exchange_experts =
      CanExchangeExperts(spec, options) &&
      ExchangesExperts(plan.model, plan.device, options.num_ranks,
                       plan.load.max_num_seqs > 0 ? plan.load.max_num_seqs : kLargestBatch);
  ASSIGN_OR_RETURN(const ShardLayout layout, BuildShardLayout(spec, weights, options));
  const Placement placement = {.num_ranks = options.num_ranks,
                               .num_stripes = 1,
                               .dp_attention = true,
                               .expert_parallel = options.expert_parallel};
  plan.placements.push_back({.name = PlacementName(spec, placement),
                             .placement = placement,
                             .weight_bytes = static_cast<double>(layout.MaxWeightBytes()),
                             .capacity_tokens = CapacityTokens(layout, plan.memory_bytes)});
  return absl::OkStatus();
}

// As many sequences as are of use: until the linear layers are bound by arithmetic, if the cache of
// some placement holds them.
int64_t UsefulBatch(const Plan& plan) {
  int64_t held = 0;
  for (const PlacementPlan& one : plan.placements) {
    if (one.placement.dp_attention != plan.layout.dp_attention) continue;
    held = std::max(held, one.capacity_tokens);
  }
  return std::clamp<int64_t>(held / plan.load.context_len, 1, plan.compute_bound_batch);
}

void Choose(const CommandLine& line, Plan& plan) {
  if (plan.load.max_num_seqs == 0) plan.load.max_num_seqs = UsefulBatch(plan);
  if (plan.layout.dp_attention) {
    plan.chosen = plan.placements.back();
    const StepTime time = PredictStep(plan.model, plan.device, plan.chosen.placement,
                                      plan.load.max_num_seqs, plan.load.context_len);
    plan.choice = {.num_stripes = 1,
                   .why = absl::StrFormat(
                       "DP attention, as asked for, with %d sequences of %d tokens: a decode step "
                       "is predicted to take %.3g ms",
                       plan.load.max_num_seqs, plan.load.context_len, time.total() * 1e3)};
    return;
  }
  std::vector<StripeOption> options;
  for (const PlacementPlan& one : plan.placements) {
    if (one.placement.dp_attention) continue;
    const bool asked = !line.engine.num_stripes.has_value() ||
                       one.placement.num_stripes == plan.layout.num_stripes;
    if (asked) options.push_back({one.placement.num_stripes, one.capacity_tokens});
  }
  plan.choice = ChooseStripes(plan.model, plan.device, plan.layout.num_ranks, options, plan.load);
  for (const PlacementPlan& one : plan.placements) {
    if (one.placement.dp_attention) continue;
    if (one.placement.num_stripes == plan.choice.num_stripes) plan.chosen = one;
  }
}

absl::StatusOr<Plan> MakePlan(const CommandLine& line) {
  Plan plan;
  plan.bare_config = IsBareConfig(line);
  ASSIGN_OR_RETURN(Checkpoint checkpoint,
                   OpenCheckpoint(line.engine.model,
                                  plan.bare_config ? LoadFormat::kDummy : line.engine.load_format,
                                  line.engine.seed));
  if (plan.bare_config) checkpoint.weights = MakeDeclaredWeights(checkpoint.spec);
  // Layouts know float8 by the types of the tensors; its scales, 4 bytes in 16,384, are left out.
  ModelSpec spec = std::move(checkpoint.spec);
  spec.block_fp8.reset();
  plan.model_path = line.engine.model;
  ASSIGN_OR_RETURN(plan.layout, LayoutOptionsOf(line, spec));
  ASSIGN_OR_RETURN(plan.device, FindDevice(line.plan.device_type, plan.layout.num_ranks));
  // The engine's own default on each kind of device.
  plan.layout.kv_cache_dtype = line.engine.kv_cache_dtype.value_or(
      plan.device.name == "cpu" ? DType::kFloat32 : DType::kBFloat16);
  ASSIGN_OR_RETURN(plan.memory_bytes, MemoryOf(line, plan.device));
  ASSIGN_OR_RETURN(plan.load.context_len, ExpectedContext(line, spec));
  plan.load.max_num_seqs = line.plan.max_num_seqs.value_or(0);
  plan.batch_sizes = line.plan.batch_sizes;
  plan.context_lens = line.plan.context_lens;
  if (plan.context_lens.empty()) plan.context_lens = {plan.load.context_len};
  RETURN_IF_ERROR(CheckSteps(plan));

  // Refused here if it cannot run at all, or with so many stripes.
  RETURN_IF_ERROR(BuildShardLayout(spec, *checkpoint.weights, plan.layout).status());
  if (plan.layout.num_ranks == 1) plan.layout.dp_attention = false;  // of no effect
  plan.model =
      CostsOf(spec, *checkpoint.weights, plan.layout.kv_cache_dtype, plan.layout.weight_dtype);
  plan.compute_bound_batch = ComputeBoundBatch(plan.model, plan.device);
  RETURN_IF_ERROR(AddPlacements(spec, *checkpoint.weights, plan));
  Choose(line, plan);
  if (plan.chosen.capacity_tokens == 0) {
    ShardLayoutOptions options = plan.layout;
    options.memory_bytes = static_cast<int64_t>(plan.memory_bytes);
    const absl::Status refusal = BuildShardLayout(spec, *checkpoint.weights, options).status();
    plan.does_not_fit = std::string(refusal.message());
  }
  return plan;
}

}  // namespace

absl::StatusOr<int> RunPlan(const CommandLine& line) {
  ASSIGN_OR_RETURN(const Plan plan, MakePlan(line));
  const std::string report = line.output_format == "json" ? PlanAsJson(plan) : PlanAsText(plan);
  std::fputs(report.c_str(), stdout);
  return kExitOk;
}

}  // namespace heddle
