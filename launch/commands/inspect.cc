#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "launch/commands/commands.h"
#include "launch/commands/layout_flags.h"
#include "nlohmann/json.hpp"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cost_model.h"
#include "runtime/device_table.h"
#include "runtime/shard_layout.h"
#include "runtime/stripe_choice.h"

namespace heddle {
namespace {

using Json = nlohmann::ordered_json;

Json RangeJson(const Range& range) { return {range.begin, range.end}; }

std::string RangeText(const Range& range) {
  return range.empty() ? "-" : absl::StrCat(range.begin, "..", range.end - 1);
}

Json DescribeModel(const CommandLine& line, const Checkpoint& checkpoint) {
  const ModelSpec& spec = checkpoint.spec;
  std::map<std::string, int64_t> dtypes;
  int64_t parameters = 0;
  for (const TensorInfo& tensor : checkpoint.weights->tensors()) {
    int64_t elements = 1;
    for (const int64_t size : tensor.shape) elements *= size;
    parameters += elements;
    dtypes[std::string(DTypeName(tensor.dtype))] += elements;
  }
  const auto windowed = std::count_if(spec.windows.begin(), spec.windows.end(),
                                      [](int64_t window) { return window > 0; });
  Json json = {{"model", line.engine.model},
               {"model_type", spec.model_type},
               {"parameters", parameters},
               {"elements_by_dtype", dtypes},
               {"layers", spec.num_layers},
               {"hidden_size", spec.hidden_size},
               {"intermediate_size", spec.intermediate_size},
               {"query_heads", spec.total_query_heads},
               {"kv_heads", spec.total_kv_heads},
               {"head_dim", spec.head_dim},
               {"vocab_size", spec.vocab_size},
               {"tie_word_embeddings", spec.tie_word_embeddings},
               {"max_position_embeddings", spec.max_position_embeddings},
               {"layers_with_window", windowed}};
  if (spec.mla.has_value()) {
    json["q_lora_rank"] = spec.mla->q_lora_rank;
    json["kv_lora_rank"] = spec.mla->kv_lora_rank;
    json["qk_nope_head_dim"] = spec.mla->qk_nope_head_dim;
    json["qk_rope_head_dim"] = spec.mla->qk_rope_head_dim;
    json["v_head_dim"] = spec.mla->v_head_dim;
  }
  if (spec.moe.has_value()) {
    const MoeSpec& moe = *spec.moe;
    json["experts"] = moe.num_experts;
    json["experts_per_token"] = moe.num_experts_per_token;
    json["expert_intermediate_size"] = moe.expert_intermediate_size;
    json["shared_intermediate_size"] = moe.shared_intermediate_size;
    json["layers_with_experts"] = std::count(moe.layers.begin(), moe.layers.end(), true);
  }
  if (windowed > 0) json["window"] = *std::max_element(spec.windows.begin(), spec.windows.end());
  return json;
}

// What a rank holds of the first layer with experts; null if it holds none, or there is none.
const FfnShare* FirstWithExperts(const RankLayout& rank) {
  const auto share = std::find_if(rank.ffn.begin(), rank.ffn.end(),
                                  [](const FfnShare& ffn) { return !ffn.experts.empty(); });
  return share == rank.ffn.end() ? nullptr : &*share;
}

Json DescribeLayout(const ShardLayout& layout) {
  Json ranks = Json::array();
  for (size_t rank = 0; rank < layout.ranks.size(); ++rank) {
    const RankLayout& one = layout.ranks[rank];
    ranks.push_back({{"rank", rank},
                     {"head_shard", one.heads.head_shard},
                     {"stripe", one.heads.stripe},
                     {"query_heads", RangeJson(one.heads.query_heads)},
                     {"kv_heads", RangeJson(one.heads.kv_heads)},
                     {"ffn_columns", RangeJson(one.ffn.front().columns)},
                     {"vocabulary", RangeJson(one.vocabulary)},
                     {"weight_bytes", one.weight_bytes},
                     {"kv_bytes_per_token", one.kv.bytes_per_token()}});
    if (const FfnShare* share = FirstWithExperts(one)) {
      ranks.back()["experts"] = RangeJson(share->experts);
      ranks.back()["expert_columns"] = RangeJson(share->columns);
      ranks.back()["shared_expert_columns"] = RangeJson(share->shared_columns);
    }
  }
  int64_t total = 0;
  for (const RankLayout& one : layout.ranks) total += one.weight_bytes;
  return {
      {"tensor_parallel_size", layout.ranks.size()},
      {"head_shards", layout.grid.num_head_shards()},
      {"stripes", layout.grid.num_stripes()},
      {"dp_attention", layout.grid.data_parallel()},
      {"exchanges_experts", layout.exchanges_experts},
      {"max_weight_bytes", layout.MaxWeightBytes()},
      // A step waits for the rank that reads most: 1 is an even deal of what one rank would hold.
      {"mean_over_max_weight_bytes", static_cast<double>(total) /
                                         static_cast<double>(layout.ranks.size()) /
                                         static_cast<double>(layout.MaxWeightBytes())},
      {"ranks", ranks}};
}

void PrintText(const Json& model, const ShardLayout& layout) {
  for (const auto& [key, value] : model.items()) {
    if (key == "elements_by_dtype") {
      std::vector<std::string> parts;
      for (const auto& [dtype, elements] : value.items()) {
        parts.push_back(
            absl::StrFormat("%s %.1f %%", dtype,
                            100.0 * elements.get<double>() / model["parameters"].get<double>()));
      }
      std::printf("%-26s %s\n", "stored as", absl::StrJoin(parts, ", ").c_str());
    } else {
      std::printf("%-26s %s\n", key.c_str(),
                  value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
    }
  }
  std::printf("\n%zu rank(s): %d head shard(s) x %d stripe(s)%s\n", layout.ranks.size(),
              layout.grid.num_head_shards(), layout.grid.num_stripes(),
              layout.grid.data_parallel() ? ", each sequence on one of them with all heads" : "");
  if (layout.exchanges_experts) std::printf("tokens travel to their experts alone\n");
  std::printf("%5s %12s %10s %14s %16s %12s %14s\n", "rank", "query heads", "KV heads",
              "FFN columns", "vocabulary", "weights", "KV/token");
  for (size_t rank = 0; rank < layout.ranks.size(); ++rank) {
    const RankLayout& one = layout.ranks[rank];
    std::printf("%5zu %12s %10s %14s %16s %12s %14s\n", rank,
                RangeText(one.heads.query_heads).c_str(), RangeText(one.heads.kv_heads).c_str(),
                RangeText(one.ffn.front().columns).c_str(), RangeText(one.vocabulary).c_str(),
                BytesText(static_cast<double>(one.weight_bytes)).c_str(),
                BytesText(static_cast<double>(one.kv.bytes_per_token())).c_str());
  }
  if (layout.ranks.size() > 1) {
    std::printf("mean over largest weight shard: %.3f\n",
                DescribeLayout(layout)["mean_over_max_weight_bytes"].get<double>());
  }
}

// What --decode-context-parallel-size auto would stand for, and by whose figures. A job measures
// its ranks and links instead.
absl::StatusOr<StripeChoice> ChooseForDevice(const CommandLine& line, const Checkpoint& checkpoint,
                                             const ShardLayoutOptions& options) {
  ASSIGN_OR_RETURN(const DeviceFigures device,
                   FindDevice(line.plan.device_type, options.num_ranks));
  ASSIGN_OR_RETURN(const double memory, MemoryOf(line, device));
  ASSIGN_OR_RETURN(const std::vector<StripeOption> stripes,
                   StripeOptionsOf(checkpoint.spec, *checkpoint.weights, options, memory));
  ASSIGN_OR_RETURN(const int64_t context, ExpectedContext(line, checkpoint.spec));
  const ExpectedLoad load = {
      .max_num_seqs = line.plan.max_num_seqs.value_or(line.engine.max_num_seqs),
      .context_len = context};
  StripeChoice choice = ChooseStripes(
      CostsOf(checkpoint.spec, *checkpoint.weights, options.kv_cache_dtype, options.weight_dtype),
      device, options.num_ranks, stripes, load);
  absl::StrAppend(&choice.why, "; by the figures of ", device.name, " (", device.source,
                  "; links as in the table), where a job measures its own ranks and links");
  return choice;
}

// Whether tokens of such a job would travel to their experts.
absl::StatusOr<bool> ExchangesOnDevice(const CommandLine& line, const Checkpoint& checkpoint,
                                       const ShardLayoutOptions& options) {
  const ModelSpec& spec = checkpoint.spec;
  if (!CanExchangeExperts(spec, options)) return false;
  ASSIGN_OR_RETURN(const DeviceFigures device,
                   FindDevice(line.plan.device_type, options.num_ranks));
  return ExchangesExperts(
      CostsOf(spec, *checkpoint.weights, options.kv_cache_dtype, options.weight_dtype), device,
      options.num_ranks, line.plan.max_num_seqs.value_or(line.engine.max_num_seqs));
}

}  // namespace

absl::StatusOr<int> RunInspect(const CommandLine& line) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                   OpenCheckpoint(line.engine.model, line.engine.load_format, line.engine.seed));
  ASSIGN_OR_RETURN(ShardLayoutOptions options, LayoutOptionsOf(line, checkpoint.spec));
  options.kv_cache_dtype = line.engine.kv_cache_dtype.value_or(DType::kFloat32);
  ASSIGN_OR_RETURN(options.exchange_experts, ExchangesOnDevice(line, checkpoint, options));
  ASSIGN_OR_RETURN(const ShardLayout layout,
                   BuildShardLayout(checkpoint.spec, *checkpoint.weights, options));
  const Json model = DescribeModel(line, checkpoint);
  std::optional<StripeChoice> choice;
  if (options.num_ranks > 1 && !options.dp_attention && !line.engine.num_stripes.has_value()) {
    ASSIGN_OR_RETURN(choice, ChooseForDevice(line, checkpoint, options));
  }
  if (line.output_format == "json") {
    Json json = model;
    json["layout"] = DescribeLayout(layout);
    if (choice.has_value()) json["auto"] = {{"stripes", choice->num_stripes}, {"why", choice->why}};
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    PrintText(model, layout);
    if (choice.has_value()) {
      std::printf("\nauto would be %s\n", choice->why.c_str());
    }
  }
  return kExitOk;
}

}  // namespace heddle
