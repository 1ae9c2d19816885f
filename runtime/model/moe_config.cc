// Keys as DeepSeek's, Mistral's and Qwen's own configurations have them and as transformers writes
// them. Where DeepSeek's code and transformers disagree, the key is refused.
#include "runtime/model/moe_config.h"

#include <algorithm>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

bool IsDeepSeekV2(const ModelSpec& spec) { return spec.model_type == "deepseek_v2"; }

// As long as the spec says, however wrong that is.
std::vector<bool> AllLayers(const ModelSpec& spec) {
  return std::vector<bool>(std::clamp<int64_t>(spec.num_layers, 0, kMaxLayers), true);
}

MoeSpec ReadMixtralExperts(const ConfigReader& config, const ModelSpec& spec) {
  MoeSpec moe;
  moe.num_experts = config.RequiredInteger("num_local_experts");
  moe.num_experts_per_token = config.RequiredInteger("num_experts_per_tok");
  moe.expert_intermediate_size = spec.intermediate_size;
  moe.layers = AllLayers(spec);
  return moe;
}

MoeSpec ReadQwenExperts(const ConfigReader& config, const ModelSpec& spec) {
  MoeSpec moe;
  const bool renamed = config.Find("num_experts") == nullptr && config.HasKey("num_local_experts");
  moe.num_experts = config.RequiredInteger(renamed ? "num_local_experts" : "num_experts");
  moe.num_experts_per_token = config.RequiredInteger("num_experts_per_tok");
  moe.expert_intermediate_size = config.RequiredInteger("moe_intermediate_size");
  moe.layers = AllLayers(spec);
  const int64_t step = config.Integer("decoder_sparse_step").value_or(1);
  if (step < 1) config.AddProblem("decoder_sparse_step", absl::StrCat("is ", step, ", below 1"));
  const std::vector<int64_t> dense_layers = config.Integers("mlp_only_layers");
  for (size_t layer = 0; layer < moe.layers.size(); ++layer) {
    const auto index = static_cast<int64_t>(layer);
    moe.layers[layer] =
        step >= 1 && (index + 1) % step == 0 && !absl::c_linear_search(dense_layers, index);
  }
  return moe;
}

MoeSpec ReadDeepSeekExperts(const ConfigReader& config, const ModelSpec& spec) {
  MoeSpec moe;
  moe.num_experts = config.RequiredInteger("n_routed_experts");
  moe.num_experts_per_token = config.RequiredInteger("num_experts_per_tok");
  moe.expert_intermediate_size = config.RequiredInteger("moe_intermediate_size");
  const int64_t num_shared = config.Integer("n_shared_experts").value_or(0);
  if (num_shared < 0 || num_shared > kMaxExperts) {
    config.AddProblem("n_shared_experts",
                      absl::StrCat("is ", num_shared, "; it must be between 0 and ", kMaxExperts));
  } else if (moe.expert_intermediate_size > 0 && moe.expert_intermediate_size <= kMaxWidth) {
    moe.shared_intermediate_size = num_shared * moe.expert_intermediate_size;
  }
  const int64_t first = IsDeepSeekV2(spec) ? config.Integer("first_k_dense_replace").value_or(0)
                                           : config.RequiredInteger("first_k_dense_replace");
  const int64_t frequency = config.Integer("moe_layer_freq").value_or(1);
  if (frequency < 1)
    config.AddProblem("moe_layer_freq", absl::StrCat("is ", frequency, ", below 1"));
  moe.layers = AllLayers(spec);
  for (size_t layer = 0; layer < moe.layers.size(); ++layer) {
    const auto index = static_cast<int64_t>(layer);
    moe.layers[layer] = frequency >= 1 && index >= first && index % frequency == 0;
  }
  return moe;
}

// Adds a problem if `key` is there and says something else than `only`.
void Require(const ConfigReader& config, absl::string_view key, absl::string_view only,
             const ModelSpec& spec) {
  const std::string value = config.String(key).value_or(std::string(only));
  if (value == only) return;
  config.AddProblem(key, absl::StrCat("\"", value, "\" is not supported for ", spec.model_type,
                                      "; \"", only, "\" is"));
}

void ReadGroups(const ConfigReader& config, MoeSpec& moe) {
  moe.num_groups = config.RequiredInteger("n_group");
  moe.num_top_groups = config.RequiredInteger("topk_group");
}

void ReadDeepSeekV2Routing(const ConfigReader& config, const ModelSpec& spec, MoeSpec& moe) {
  Require(config, "scoring_func", "softmax", spec);
  const std::string method = config.String("topk_method").value_or("greedy");
  if (method == "group_limited_greedy") {
    ReadGroups(config, moe);
  } else if (method != "greedy") {
    config.AddProblem("topk_method", absl::StrCat("\"", method,
                                                  "\" is not supported for deepseek_v2; \"greedy\" "
                                                  "and \"group_limited_greedy\" are"));
  }
  if (config.Bool("norm_topk_prob").value_or(false)) {
    config.AddProblem("norm_topk_prob", "must be false: references of deepseek_v2 disagree on it");
  }
  moe.routed_scaling_factor = config.Number("routed_scaling_factor").value_or(1.0);
}

void ReadDeepSeekV3Routing(const ConfigReader& config, const ModelSpec& spec, MoeSpec& moe) {
  Require(config, "scoring_func", "sigmoid", spec);
  Require(config, "topk_method", "noaux_tc", spec);
  moe.score = RouterScore::kSigmoid;
  moe.correction_bias = true;
  moe.group_score = GroupScore::kTopTwoSum;
  ReadGroups(config, moe);
  moe.normalise_weights = config.Bool("norm_topk_prob").value_or(true);
  if (moe.normalise_weights && moe.num_experts_per_token == 1) {
    config.AddProblem("norm_topk_prob", "references disagree on it where num_experts_per_tok is 1");
  }
  if (config.Find("routed_scaling_factor") == nullptr) {
    config.AddProblem("routed_scaling_factor", "missing");
  }
  moe.routed_scaling_factor = config.Number("routed_scaling_factor").value_or(1.0);
}

}  // namespace

std::optional<MoeSpec> ReadExperts(const ConfigReader& config, const ModelSpec& spec) {
  MoeSpec moe;
  if (spec.model_type == "mixtral") {
    moe = ReadMixtralExperts(config, spec);
  } else if (spec.model_type == "qwen3_moe") {
    moe = ReadQwenExperts(config, spec);
  } else if (spec.mla) {
    moe = ReadDeepSeekExperts(config, spec);
  } else {
    return std::nullopt;
  }
  if (!absl::c_linear_search(moe.layers, true)) return std::nullopt;
  return moe;
}

void ReadRouting(const ConfigReader& config, const ModelSpec& spec, MoeSpec& moe) {
  if (spec.model_type == "mixtral") {
    moe.normalise_weights = true;
  } else if (spec.model_type == "qwen3_moe") {
    moe.normalise_weights = config.Bool("norm_topk_prob").value_or(false);
  } else if (IsDeepSeekV2(spec)) {
    ReadDeepSeekV2Routing(config, spec, moe);
  } else {
    ReadDeepSeekV3Routing(config, spec, moe);
  }
}

}  // namespace heddle
