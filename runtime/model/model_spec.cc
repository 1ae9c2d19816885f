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

// Bounds that no real model comes near and under which no product of two sizes overflows.
constexpr int64_t kMaxIds = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxWidth = int64_t{1} << 22;
constexpr int64_t kMaxHeads = int64_t{1} << 14;
constexpr int64_t kMaxHeadDim = int64_t{1} << 12;

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
  }
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
  problems.CheckSize("head_dim", spec.head_dim, kMaxHeadDim);
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
  return list;
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

std::vector<ExpectedTensor> ExpectedTensors(const ModelSpec& spec) {
  const int64_t hidden = spec.hidden_size;
  const int64_t query_width = spec.total_query_heads * spec.head_dim;
  const int64_t kv_width = spec.total_kv_heads * spec.head_dim;

  std::vector<ExpectedTensor> tensors;
  tensors.push_back({"model.embed_tokens.weight", {spec.vocab_size, hidden}});
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    const auto add_vector = [&](absl::string_view name, int64_t size) {
      tensors.push_back({absl::StrCat(prefix, name, ".weight"), {size}});
    };
    const auto add_linear = [&](absl::string_view name, int64_t out, int64_t in, bool bias) {
      tensors.push_back({absl::StrCat(prefix, name, ".weight"), {out, in}});
      if (bias) tensors.push_back({absl::StrCat(prefix, name, ".bias"), {out}});
    };
    add_vector("input_layernorm", hidden);
    add_linear("self_attn.q_proj", query_width, hidden, spec.qkv_bias);
    add_linear("self_attn.k_proj", kv_width, hidden, spec.qkv_bias);
    add_linear("self_attn.v_proj", kv_width, hidden, spec.qkv_bias);
    if (spec.qk_norm) {
      add_vector("self_attn.q_norm", spec.head_dim);
      add_vector("self_attn.k_norm", spec.head_dim);
    }
    add_linear("self_attn.o_proj", hidden, query_width, spec.output_bias);
    add_vector("post_attention_layernorm", hidden);
    add_linear("mlp.gate_proj", spec.intermediate_size, hidden, spec.mlp_bias);
    add_linear("mlp.up_proj", spec.intermediate_size, hidden, spec.mlp_bias);
    add_linear("mlp.down_proj", hidden, spec.intermediate_size, spec.mlp_bias);
  }
  tensors.push_back({"model.norm.weight", {hidden}});
  if (!spec.tie_word_embeddings) tensors.push_back({"lm_head.weight", {spec.vocab_size, hidden}});
  return tensors;
}

bool IsIgnorableTensor(const ModelSpec& spec, absl::string_view name) {
  if (absl::EndsWith(name, "rotary_emb.inv_freq")) return true;
  if (absl::StartsWith(name, "mtp.") || LayerOf(name) >= spec.num_layers) return true;
  return spec.tie_word_embeddings && name == "lm_head.weight";
}

}  // namespace heddle
