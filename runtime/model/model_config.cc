// config.json of Llama's and DeepSeek's families → ModelSpec. Absent keys take the defaults of
// Hugging Face's configuration classes where those are the same for every member of the family; the
// shape of a model is never guessed.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"
#include "runtime/model/config_reader.h"
#include "runtime/model/model_spec.h"
#include "runtime/model/moe_config.h"
#include "runtime/model/problem_list.h"
#include "runtime/model/rope_config.h"
#include "runtime/model/strict_json.h"

namespace heddle {
namespace {

using nlohmann::json;

constexpr int64_t kDefaultSlidingWindow = 4096;
constexpr int64_t kDefaultMaxWindowLayers = 28;
constexpr int64_t kDefaultQwen3HeadDim = 128;

bool IsMlaFamily(absl::string_view model_type) {
  return model_type == "deepseek_v2" || model_type == "deepseek_v3" || model_type == "kimi_k2";
}

// Tokens that a windowed layer sees; 0 if the config says null.
int64_t SlidingWindow(const ConfigReader& config, const ModelSpec& spec) {
  if (config.HasKey("sliding_window")) return config.Integer("sliding_window").value_or(0);
  return spec.model_type == "mixtral" ? 0 : kDefaultSlidingWindow;
}

bool IsWindowedQwen(const ConfigReader& config, const ModelSpec& spec) {
  if (!absl::StartsWith(spec.model_type, "qwen")) return false;
  const bool windowed = config.Bool("use_sliding_window").value_or(false);
  if (windowed && spec.model_type == "qwen3_moe") {
    config.AddProblem("use_sliding_window", "true is not supported for qwen3_moe");
    return false;
  }
  return windowed;
}

// Tokens seen by each layer as the family's rule has it, before layer_types.
std::vector<int64_t> WindowsByRule(const ConfigReader& config, const ModelSpec& spec) {
  const int64_t num_layers = std::clamp<int64_t>(spec.num_layers, 0, kMaxLayers);
  std::vector<int64_t> windows(num_layers, 0);
  int64_t first_windowed_layer = num_layers;
  if (spec.model_type == "mistral" || spec.model_type == "mixtral") {
    first_windowed_layer = 0;
  } else if (IsWindowedQwen(config, spec)) {
    first_windowed_layer = config.Integer("max_window_layers").value_or(kDefaultMaxWindowLayers);
  }
  for (int64_t layer = std::max<int64_t>(first_windowed_layer, 0); layer < num_layers; ++layer) {
    windows[layer] = SlidingWindow(config, spec);
  }
  return windows;
}

std::vector<int64_t> ReadWindows(const ConfigReader& config, const ModelSpec& spec) {
  std::vector<int64_t> windows = WindowsByRule(config, spec);
  const std::vector<std::string> layer_types = config.Strings("layer_types");
  if (layer_types.empty()) return windows;
  if (layer_types.size() != windows.size()) {
    config.AddProblem("layer_types",
                      absl::StrCat("lists ", layer_types.size(), " layers of ", spec.num_layers));
    return windows;
  }
  for (size_t layer = 0; layer < windows.size(); ++layer) {
    const std::string& type = layer_types[layer];
    const bool sliding = type == "sliding_attention";
    if (!sliding && type != "full_attention") {
      config.AddProblem("layer_types",
                        absl::StrCat("unknown type \"", type,
                                     "\"; supported are full_attention and sliding_attention"));
      return windows;
    }
    // Qwen's list decides where the window is; the other families' rules leave it nothing to say.
    if (IsWindowedQwen(config, spec)) windows[layer] = sliding ? SlidingWindow(config, spec) : 0;
    if (sliding != (windows[layer] != 0)) {
      config.AddProblem("layer_types", absl::StrCat("layer ", layer, " is \"", type,
                                                    "\", which the other keys contradict"));
      return windows;
    }
  }
  return windows;
}

std::vector<int32_t> ReadTokenIds(const ConfigReader& config, absl::string_view key) {
  std::vector<int32_t> ids;
  for (const int64_t id : config.Integers(key)) {
    if (id < 0 || id > std::numeric_limits<int32_t>::max()) {
      config.AddProblem(key, absl::StrCat(id, " is no token id"));
    } else {
      ids.push_back(static_cast<int32_t>(id));
    }
  }
  return ids;
}

void ReadStoredDType(const ConfigReader& config, ModelSpec& spec) {
  const absl::string_view key = config.Find("dtype") != nullptr ? "dtype" : "torch_dtype";
  const std::optional<std::string> name = config.String(key);
  if (!name) return;
  const absl::StatusOr<DType> dtype = ParseDType(*name);
  if (dtype.ok() && IsFloatingPoint(*dtype)) {
    spec.stored_dtype = *dtype;
  } else {
    config.AddProblem(
        key, absl::StrCat("\"", *name, "\" is not supported; float32, bfloat16 and float16 are"));
  }
}

// What tells the families apart.
void ReadFamily(const ConfigReader& config, ModelSpec& spec) {
  if (spec.mla || spec.model_type == "llama" || absl::StartsWith(spec.model_type, "qwen3")) {
    spec.qkv_bias = spec.output_bias = config.Bool("attention_bias").value_or(false);
  }
  if (spec.model_type == "llama") spec.mlp_bias = config.Bool("mlp_bias").value_or(false);
  if (spec.model_type == "qwen2") spec.qkv_bias = true;
  spec.qk_norm = absl::StartsWith(spec.model_type, "qwen3");
  if (spec.model_type == "deepseek_v2" && config.Bool("mlp_bias").value_or(false)) {
    config.AddProblem("mlp_bias", "true is not supported for deepseek_v2");
  }
}

// Heads of latent attention; head_dim, which configs of these families give many meanings, is
// theirs to say.
void ReadMlaShape(const ConfigReader& config, ModelSpec& spec) {
  MlaSpec& mla = spec.mla.emplace();
  mla.kv_lora_rank = config.RequiredInteger("kv_lora_rank");
  mla.qk_nope_head_dim = config.RequiredInteger("qk_nope_head_dim");
  mla.qk_rope_head_dim = config.RequiredInteger("qk_rope_head_dim");
  mla.v_head_dim = config.RequiredInteger("v_head_dim");
  if (config.Find("q_lora_rank") != nullptr) {
    mla.q_lora_rank = config.Integer("q_lora_rank").value_or(0);
    if (mla.q_lora_rank == 0) config.AddProblem("q_lora_rank", "must be above 0, or null");
  } else if (!config.HasKey("q_lora_rank")) {
    config.AddProblem("q_lora_rank", "missing; null says that there is none");
  }
  const auto in_bounds = [](int64_t dim) { return dim >= 1 && dim <= kMaxHeadDim; };
  if (in_bounds(mla.qk_nope_head_dim) && in_bounds(mla.qk_rope_head_dim)) {
    spec.head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
  }

  // Some configs count the one latent, some the heads expanded from it.
  const int64_t kv_heads = config.Integer("num_key_value_heads").value_or(1);
  if (kv_heads != 1 && kv_heads != spec.total_query_heads) {
    config.AddProblem("num_key_value_heads",
                      absl::StrCat("is ", kv_heads, "; with latent attention it must be 1 or ",
                                   "num_attention_heads (", spec.total_query_heads, ")"));
  }
  spec.total_kv_heads = 1;
}

// Grouped-query attention's heads.
void ReadGqaShape(const ConfigReader& config, ModelSpec& spec) {
  spec.total_kv_heads = config.Integer("num_key_value_heads").value_or(spec.total_query_heads);
  if (!config.HasKey("num_key_value_heads") && spec.model_type != "llama") {
    config.AddProblem("num_key_value_heads", "missing");  // its default is a number of its own
  }
  if (config.Find("head_dim") != nullptr) {
    spec.head_dim = config.Integer("head_dim").value_or(0);
  } else if (spec.model_type == "qwen3") {
    spec.head_dim = kDefaultQwen3HeadDim;
  } else if (spec.total_query_heads > 0) {
    spec.head_dim = spec.hidden_size / spec.total_query_heads;
    if (spec.hidden_size % spec.total_query_heads != 0) {
      config.AddProblem("head_dim", absl::StrCat("missing, and hidden_size (", spec.hidden_size,
                                                 ") is not a multiple of num_attention_heads (",
                                                 spec.total_query_heads, ")"));
    }
  }
}

void ReadShape(const ConfigReader& config, ModelSpec& spec) {
  spec.vocab_size = config.RequiredInteger("vocab_size");
  spec.hidden_size = config.RequiredInteger("hidden_size");
  spec.intermediate_size = config.RequiredInteger("intermediate_size");
  spec.num_layers = config.RequiredInteger("num_hidden_layers");
  spec.total_query_heads = config.RequiredInteger("num_attention_heads");
  spec.max_position_embeddings = config.RequiredInteger("max_position_embeddings");
  if (IsMlaFamily(spec.model_type)) {
    ReadMlaShape(config, spec);
  } else {
    ReadGqaShape(config, spec);
  }
  spec.moe = ReadExperts(config, spec);
}

void ReadQuantization(const ConfigReader& config, ModelSpec& spec,
                      std::vector<std::string>& problems) {
  const json* quantization = config.Object("quantization_config");
  if (quantization == nullptr) return;
  const ConfigReader reader(*quantization, "quantization_config.", problems);
  const std::string method = reader.String("quant_method").value_or("?");
  if (method != "fp8") {
    config.AddProblem("quantization_config",
                      absl::StrCat("weights quantised by \"", method,
                                   "\" are not supported; GGUF's block types and block-fp8 are"));
    return;
  }
  const std::string format = reader.String("fmt").value_or("e4m3");
  if (format != "e4m3") {
    reader.AddProblem("fmt", absl::StrCat("\"", format, "\" is not supported; \"e4m3\" is"));
  }
  // Activations are not rounded here, so that scales of theirs, known beforehand, go unused.
  const std::string scheme = reader.String("activation_scheme").value_or("dynamic");
  if (scheme != "dynamic") {
    reader.AddProblem("activation_scheme",
                      absl::StrCat("\"", scheme, "\" is not supported; \"dynamic\" is"));
  }
  const std::vector<int64_t> block = reader.Integers("weight_block_size");
  if (block.size() == 2) {
    spec.block_fp8 = {.block_rows = block[0], .block_columns = block[1]};
  } else {
    reader.AddProblem("weight_block_size", "must list the rows and the columns of a block");
  }
}

}  // namespace

absl::StatusOr<ModelSpec> ParseModelConfig(absl::string_view text, absl::string_view file_name) {
  ASSIGN_OR_RETURN(const json root, ParseStrictJson(text, file_name));
  if (!root.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ": expected a JSON object, found ", root.type_name()));
  }
  std::vector<std::string> problems;
  const ConfigReader config(root, "", problems);

  ModelSpec spec;
  spec.model_type = config.String("model_type").value_or("");
  constexpr absl::string_view kModelTypes[] = {"llama",       "mistral",     "qwen2",
                                               "qwen3",       "mixtral",     "qwen3_moe",
                                               "deepseek_v2", "deepseek_v3", "kimi_k2"};
  if (!absl::c_linear_search(kModelTypes, spec.model_type)) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": model_type \"", spec.model_type,
                                                   "\" is not supported; supported are ",
                                                   absl::StrJoin(kModelTypes, ", ")));
  }
  ReadShape(config, spec);
  const bool shape_known = problems.empty();

  spec.rms_norm_epsilon =
      config.Number("rms_norm_eps").value_or(spec.model_type == "mixtral" ? 1e-5 : 1e-6);
  spec.tie_word_embeddings = config.Bool("tie_word_embeddings").value_or(false);
  ReadFamily(config, spec);
  if (spec.moe) ReadRouting(config, spec, *spec.moe);
  spec.rope = ReadRope(config, spec, problems);
  spec.windows = ReadWindows(config, spec);
  spec.eos_token_ids = ReadTokenIds(config, "eos_token_id");
  const std::vector<int32_t> bos = ReadTokenIds(config, "bos_token_id");
  if (!bos.empty()) spec.bos_token_id = bos.front();
  ReadStoredDType(config, spec);

  const std::string activation = config.String("hidden_act").value_or("silu");
  if (activation != "silu") {
    config.AddProblem("hidden_act",
                      absl::StrCat("\"", activation, "\" is not supported; \"silu\" is"));
  }
  ReadQuantization(config, spec, problems);
  if (shape_known) {
    for (std::string& problem : FindSpecProblems(spec)) problems.push_back(std::move(problem));
  }
  RETURN_IF_ERROR(ProblemsToStatus(file_name, problems));
  return spec;
}

}  // namespace heddle
