#include "runtime/model/model_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace heddle {
namespace {

constexpr int64_t kMaxIds = std::numeric_limits<int32_t>::max();
constexpr double kMaxMscale = 1000.0;

class Problems {
 public:
  explicit Problems(std::vector<std::string>& list) : list_(list) {}

  template <typename... Parts>
  void AddIf(bool wrong, const Parts&... parts) {
    if (wrong) list_.push_back(absl::StrCat(parts...));
  }
  void CheckSize(absl::string_view name, int64_t value, int64_t limit) {
    AddIf(value < 1 || value > limit, name, " is ", value, "; it must be between 1 and ", limit);
  }
  void CheckId(absl::string_view name, int64_t id, int64_t vocab_size) {
    AddIf(id < 0 || id >= vocab_size, name, " is ", id, ", outside the vocabulary of ", vocab_size);
  }
  // 0 is allowed.
  void CheckUpTo(absl::string_view name, int64_t value, int64_t limit) {
    AddIf(value < 0 || value > limit, name, " is ", value, "; it must be between 0 and ", limit);
  }
  // Not a number fails too.
  void CheckAbove(absl::string_view name, double value, double bound) {
    AddIf(!(value > bound) || std::isinf(value), name, " is ", value, "; it must be above ", bound);
  }

 private:
  std::vector<std::string>& list_;
};

void CheckRope(const ModelSpec& spec, Problems& problems) {
  const RopeSpec& rope = spec.rope;
  problems.AddIf(rope.rotary_dim < 2 || rope.rotary_dim % 2 != 0 || rope.rotary_dim > spec.head_dim,
                 "rotary dimension ", rope.rotary_dim,
                 " must be even, at least 2 and at most head_dim (", spec.head_dim, ")");
  problems.CheckAbove("rope_theta", rope.theta, 1.0);
  if (rope.scaling == RopeSpec::Scaling::kNone) return;
  problems.AddIf(!(rope.factor >= 1.0) || std::isinf(rope.factor), "rope scaling: factor is ",
                 rope.factor, "; it must be at least 1");
  if (rope.scaling == RopeSpec::Scaling::kLinear) return;
  problems.CheckSize("rope scaling: original_max_position_embeddings",
                     rope.original_max_position_embeddings, kMaxIds);
  if (rope.scaling == RopeSpec::Scaling::kLlama3) {
    problems.CheckAbove("rope scaling: low_freq_factor", rope.low_freq_factor, 0.0);
    problems.AddIf(!(rope.high_freq_factor > rope.low_freq_factor),
                   "rope scaling: high_freq_factor is ", rope.high_freq_factor,
                   "; it must be above low_freq_factor (", rope.low_freq_factor, ")");
  }
  if (rope.scaling == RopeSpec::Scaling::kYarn) {
    problems.CheckAbove("rope scaling: beta_fast", rope.beta_fast, 0.0);
    problems.CheckAbove("rope scaling: beta_slow", rope.beta_slow, 0.0);
    if (rope.attention_factor) {
      problems.CheckAbove("rope scaling: attention_factor", *rope.attention_factor, 0.0);
    }
    const auto check_mscale = [&](absl::string_view name, double mscale) {
      problems.AddIf(!(mscale >= 0.0 && mscale <= kMaxMscale), "rope scaling: ", name, " is ",
                     mscale, "; it must be between 0 and ", kMaxMscale);
    };
    check_mscale("mscale", rope.mscale.value_or(0.0));
    check_mscale("mscale_all_dim", rope.mscale_all_dim.value_or(0.0));
  }
}

void CheckMla(const ModelSpec& spec, Problems& problems) {
  const MlaSpec& mla = *spec.mla;
  problems.CheckUpTo("q_lora_rank", mla.q_lora_rank, kMaxWidth);
  problems.CheckSize("kv_lora_rank", mla.kv_lora_rank, kMaxWidth);
  problems.CheckSize("qk_nope_head_dim", mla.qk_nope_head_dim, kMaxHeadDim / 2);
  problems.CheckSize("qk_rope_head_dim", mla.qk_rope_head_dim, kMaxHeadDim / 2);
  problems.CheckSize("v_head_dim", mla.v_head_dim, kMaxHeadDim);
  problems.AddIf(spec.total_kv_heads != 1, "latent attention has one KV head, not ",
                 spec.total_kv_heads);
  problems.AddIf(spec.rope.rotary_dim != mla.qk_rope_head_dim, "rotary dimension ",
                 spec.rope.rotary_dim, " is not qk_rope_head_dim (", mla.qk_rope_head_dim, ")");
}

void CheckGroups(const MoeSpec& moe, Problems& problems) {
  problems.CheckSize("n_group", moe.num_groups, moe.num_experts);
  if (moe.num_groups < 1 || moe.num_groups > moe.num_experts) return;
  problems.CheckSize("topk_group", moe.num_top_groups, moe.num_groups);
  if (moe.num_top_groups < 1 || moe.num_top_groups > moe.num_groups) return;
  problems.AddIf(moe.num_experts % moe.num_groups != 0, "the number of experts (", moe.num_experts,
                 ") must be a multiple of n_group (", moe.num_groups, ")");
  const int64_t group_size = moe.num_experts / moe.num_groups;
  problems.AddIf(moe.num_groups > 1 && moe.group_score == GroupScore::kTopTwoSum && group_size < 2,
                 "n_group is ", moe.num_groups, "; groups are chosen by the best two experts and ",
                 "have one");
  problems.AddIf(moe.num_experts_per_token > moe.num_top_groups * group_size,
                 "num_experts_per_tok is ", moe.num_experts_per_token, "; the topk_group groups ",
                 "chosen have ", moe.num_top_groups * group_size, " experts");
}

void CheckMoe(const ModelSpec& spec, Problems& problems) {
  const MoeSpec& moe = *spec.moe;
  problems.CheckSize("number of experts", moe.num_experts, kMaxExperts);
  problems.CheckSize("moe_intermediate_size", moe.expert_intermediate_size, kMaxWidth);
  problems.CheckUpTo("n_shared_experts * moe_intermediate_size", moe.shared_intermediate_size,
                     kMaxWidth);
  problems.CheckAbove("routed_scaling_factor", moe.routed_scaling_factor, 0.0);
  const int64_t num_moe_layers = std::count(moe.layers.begin(), moe.layers.end(), true);
  problems.AddIf(static_cast<int64_t>(moe.layers.size()) != spec.num_layers || num_moe_layers == 0,
                 num_moe_layers, " of ", moe.layers.size(), " layers have experts; the model has ",
                 spec.num_layers, " layers");
  if (moe.num_experts < 1 || moe.num_experts > kMaxExperts) return;
  problems.AddIf(num_moe_layers * moe.num_experts > kMaxExpertsOfAllLayers, num_moe_layers,
                 " layers of ", moe.num_experts, " experts are more than ", kMaxExpertsOfAllLayers,
                 " in all");
  problems.CheckSize("num_experts_per_tok", moe.num_experts_per_token, moe.num_experts);
  CheckGroups(moe, problems);
}

// N of "model.layers.N.…", or -1.
int64_t LayerOf(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "model.layers.")) return -1;
  int64_t layer;
  if (!absl::SimpleAtoi(name.substr(0, name.find('.')), &layer)) return -1;
  return layer;
}

}  // namespace

std::vector<std::string> FindSpecProblems(const ModelSpec& spec) {
  std::vector<std::string> list;
  Problems problems(list);
  problems.CheckSize("vocab_size", spec.vocab_size, kMaxIds);
  problems.CheckSize("hidden_size", spec.hidden_size, kMaxWidth);
  problems.CheckSize("intermediate_size", spec.intermediate_size, kMaxWidth);
  problems.CheckSize("num_hidden_layers", spec.num_layers, kMaxLayers);
  problems.CheckSize("num_attention_heads", spec.total_query_heads, kMaxHeads);
  problems.CheckSize("num_key_value_heads", spec.total_kv_heads, kMaxHeads);
  if (!spec.mla) problems.CheckSize("head_dim", spec.head_dim, kMaxHeadDim);
  problems.CheckSize("max_position_embeddings", spec.max_position_embeddings, kMaxIds);
  problems.AddIf(spec.total_kv_heads > 0 && spec.total_query_heads % spec.total_kv_heads != 0,
                 "num_attention_heads (", spec.total_query_heads,
                 ") must be a multiple of num_key_value_heads (", spec.total_kv_heads, ")");
  problems.CheckAbove("rms_norm_eps", spec.rms_norm_epsilon, 0.0);
  for (const int64_t window : spec.windows) {
    if (window >= 0 && window <= kMaxIds) continue;
    problems.AddIf(true, "sliding_window is ", window, "; it must be between 1 and ", kMaxIds);
    break;
  }
  for (const int32_t id : spec.eos_token_ids) {
    problems.CheckId("eos_token_id", id, spec.vocab_size);
  }
  if (spec.bos_token_id) problems.CheckId("bos_token_id", *spec.bos_token_id, spec.vocab_size);
  CheckRope(spec, problems);
  if (spec.mla) CheckMla(spec, problems);
  if (spec.moe) CheckMoe(spec, problems);
  if (spec.block_fp8) {
    problems.CheckSize("weight_block_size", spec.block_fp8->block_rows, kMaxWidth);
    problems.CheckSize("weight_block_size", spec.block_fp8->block_columns, kMaxWidth);
  }
  return list;
}

bool HasExperts(const ModelSpec& spec, int64_t layer) {
  return spec.moe.has_value() && spec.moe->layers[layer];
}

double AttentionScale(const ModelSpec& spec) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(spec.head_dim));
  return spec.mla.has_value() ? scale * SoftmaxScaleFactor(spec.rope) : scale;
}

int64_t MaxContextLength(const ModelSpec& spec) {
  const RopeSpec& rope = spec.rope;
  double length = 0;
  switch (rope.scaling) {
    case RopeSpec::Scaling::kNone:
    case RopeSpec::Scaling::kLlama3:  // the config states the scaled length
      break;
    case RopeSpec::Scaling::kLinear:
    case RopeSpec::Scaling::kDynamic:
      length = static_cast<double>(spec.max_position_embeddings) * rope.factor;
      break;
    case RopeSpec::Scaling::kYarn:
      length = static_cast<double>(rope.original_max_position_embeddings) * rope.factor;
      break;
  }
  const auto scaled = static_cast<int64_t>(std::min(length, static_cast<double>(kMaxIds)));
  return std::max(spec.max_position_embeddings, scaled);
}

bool IsIgnorableTensor(const ModelSpec& spec, absl::string_view name) {
  if (absl::EndsWith(name, "rotary_emb.inv_freq")) return true;
  if (absl::StartsWith(name, "mtp.") || LayerOf(name) >= spec.num_layers) return true;
  return spec.tie_word_embeddings && name == "lm_head.weight";
}

}  // namespace heddle
