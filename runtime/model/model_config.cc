// config.json of the Llama family → ModelSpec. Absent keys take the defaults of Hugging Face's
// configuration classes where those are the same for every member of the family; the shape of a
// model is never guessed.
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
#include "runtime/model/problem_list.h"
#include "runtime/model/strict_json.h"

namespace heddle {
namespace {

using nlohmann::json;

constexpr int64_t kDefaultSlidingWindow = 4096;
constexpr int64_t kDefaultMaxWindowLayers = 28;
constexpr int64_t kDefaultQwen3HeadDim = 128;

std::optional<RopeSpec::Scaling> ParseRopeType(absl::string_view type) {
  if (type == "default") return RopeSpec::Scaling::kNone;
  if (type == "linear") return RopeSpec::Scaling::kLinear;
  if (type == "dynamic") return RopeSpec::Scaling::kDynamic;
  if (type == "llama3") return RopeSpec::Scaling::kLlama3;
  if (type == "yarn") return RopeSpec::Scaling::kYarn;
  return std::nullopt;
}

// The type's name; noted as a problem and "default" if there are parameters but no name for them.
std::string RopeTypeName(const ConfigReader& parameters) {
  // rope_type is the newer spelling and wins.
  std::optional<std::string> name = parameters.String("rope_type");
  if (!name) name = parameters.String("type");
  if (!name && parameters.HasKey("factor")) {
    parameters.AddProblem("rope_type", "missing, although there is a factor");
  }
  return name.value_or("default");
}

// `fallback` is a value that nothing else will find fault with.
double RequiredNumber(const ConfigReader& reader, absl::string_view key, double fallback) {
  if (reader.Find(key) == nullptr) reader.AddProblem(key, "missing");
  return reader.Number(key).value_or(fallback);
}

// Parameters of `rope.scaling`. `trained_length` is what "original" defaults to.
void ReadRopeScaling(const ConfigReader& parameters, std::optional<int64_t> original_length,
                     int64_t trained_length, RopeSpec& rope) {
  using Scaling = RopeSpec::Scaling;
  if (rope.scaling == Scaling::kNone) return;
  const int64_t original =
      original_length
          ? *original_length
          : parameters.Integer("original_max_position_embeddings").value_or(trained_length);
  switch (rope.scaling) {
    case Scaling::kNone:
    case Scaling::kLinear:
      break;
    case Scaling::kDynamic:
      // Grows from the model's own maximum, whatever "original" says.
      rope.original_max_position_embeddings = trained_length;
      break;
    case Scaling::kLlama3:
      rope.original_max_position_embeddings = original;
      rope.low_freq_factor = RequiredNumber(parameters, "low_freq_factor", 1.0);
      rope.high_freq_factor = RequiredNumber(parameters, "high_freq_factor", HUGE_VAL);
      break;
    case Scaling::kYarn: {
      rope.original_max_position_embeddings = original;
      const double beta_fast = parameters.Number("beta_fast").value_or(0.0);
      const double beta_slow = parameters.Number("beta_slow").value_or(0.0);
      if (beta_fast != 0.0) rope.beta_fast = beta_fast;
      if (beta_slow != 0.0) rope.beta_slow = beta_slow;
      rope.truncate = parameters.Bool("truncate").value_or(true);
      rope.attention_factor = parameters.Number("attention_factor");
      rope.mscale = parameters.Number("mscale");
      rope.mscale_all_dim = parameters.Number("mscale_all_dim");
      break;
    }
  }
  if (rope.scaling == Scaling::kYarn && parameters.Find("factor") == nullptr && original > 0) {
    rope.factor = static_cast<double>(trained_length) / static_cast<double>(original);
  } else {
    rope.factor = RequiredNumber(parameters, "factor", 1.0);
  }
}

RopeSpec ReadRope(const ConfigReader& config, const ModelSpec& spec,
                  std::vector<std::string>& problems) {
  RopeSpec rope;
  rope.rotary_dim = spec.head_dim;

  // "rope_scaling" beside a top-level rope_theta is the older spelling, "rope_parameters" with the
  // theta inside the newer.
  const json* scaling = config.Object("rope_scaling");
  const json* object = config.Object("rope_parameters");
  if (scaling != nullptr && object != nullptr && *scaling != *object) {
    config.AddProblem("rope_parameters", "differs from rope_scaling; keep one of them");
  }
  const json empty = json::object();
  const char* path = object != nullptr ? "rope_parameters." : "rope_scaling.";
  if (object == nullptr) object = scaling;
  if (object == nullptr) object = &empty;
  const ConfigReader parameters(*object, path, problems);

  for (const auto& [key, value] : object->items()) {
    if (value.is_object()) {
      parameters.AddProblem(key, "parameters per kind of layer are not supported");
    }
  }
  const auto inner_or_outer = [&](absl::string_view key, double otherwise) {
    const std::optional<double> inner = parameters.Number(key);
    return inner ? *inner : config.Number(key).value_or(otherwise);
  };
  rope.theta = inner_or_outer("rope_theta", 10000.0);
  if (inner_or_outer("partial_rotary_factor", 1.0) != 1.0) {
    config.AddProblem("partial_rotary_factor", "these families rotate whole heads: only 1");
  }

  const std::string type = RopeTypeName(parameters);
  const std::optional<RopeSpec::Scaling> parsed = ParseRopeType(type);
  if (!parsed) {
    parameters.AddProblem("rope_type",
                          absl::StrCat("unknown type \"", type,
                                       "\"; supported are default, linear, dynamic, llama3, yarn"));
    return rope;
  }
  rope.scaling = *parsed;
  ReadRopeScaling(parameters, config.Integer("original_max_position_embeddings"),
                  spec.max_position_embeddings, rope);
  return rope;
}

// Tokens that a windowed layer sees; 0 if the config says null.
int64_t SlidingWindow(const ConfigReader& config) {
  return config.HasKey("sliding_window") ? config.Integer("sliding_window").value_or(0)
                                         : kDefaultSlidingWindow;
}

bool IsWindowedQwen(const ConfigReader& config, const ModelSpec& spec) {
  return absl::StartsWith(spec.model_type, "qwen") &&
         config.Bool("use_sliding_window").value_or(false);
}

// Tokens seen by each layer as the family's rule has it, before layer_types.
std::vector<int64_t> WindowsByRule(const ConfigReader& config, const ModelSpec& spec) {
  const int64_t num_layers = std::clamp<int64_t>(spec.num_layers, 0, kMaxLayers);
  std::vector<int64_t> windows(num_layers, 0);
  int64_t first_windowed_layer = num_layers;
  if (spec.model_type == "mistral") {
    first_windowed_layer = 0;
  } else if (IsWindowedQwen(config, spec)) {
    first_windowed_layer = config.Integer("max_window_layers").value_or(kDefaultMaxWindowLayers);
  }
  for (int64_t layer = std::max<int64_t>(first_windowed_layer, 0); layer < num_layers; ++layer) {
    windows[layer] = SlidingWindow(config);
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
    if (IsWindowedQwen(config, spec)) windows[layer] = sliding ? SlidingWindow(config) : 0;
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
  if (spec.model_type == "llama" || spec.model_type == "qwen3") {
    spec.qkv_bias = spec.output_bias = config.Bool("attention_bias").value_or(false);
  }
  if (spec.model_type == "llama") spec.mlp_bias = config.Bool("mlp_bias").value_or(false);
  if (spec.model_type == "qwen2") spec.qkv_bias = true;
  spec.qk_norm = spec.model_type == "qwen3";
}

void ReadShape(const ConfigReader& config, ModelSpec& spec) {
  spec.vocab_size = config.RequiredInteger("vocab_size");
  spec.hidden_size = config.RequiredInteger("hidden_size");
  spec.intermediate_size = config.RequiredInteger("intermediate_size");
  spec.num_layers = config.RequiredInteger("num_hidden_layers");
  spec.total_query_heads = config.RequiredInteger("num_attention_heads");
  spec.total_kv_heads = config.Integer("num_key_value_heads").value_or(spec.total_query_heads);
  if (!config.HasKey("num_key_value_heads") && spec.model_type != "llama") {
    config.AddProblem("num_key_value_heads", "missing");  // its default is a number of its own
  }
  spec.max_position_embeddings = config.RequiredInteger("max_position_embeddings");

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
  constexpr absl::string_view kModelTypes[] = {"llama", "mistral", "qwen2", "qwen3"};
  if (!absl::c_linear_search(kModelTypes, spec.model_type)) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": model_type \"", spec.model_type,
                                                   "\" is not supported; supported are ",
                                                   absl::StrJoin(kModelTypes, ", ")));
  }
  ReadShape(config, spec);
  const bool shape_known = problems.empty();

  spec.rms_norm_epsilon = config.Number("rms_norm_eps").value_or(1e-6);
  spec.tie_word_embeddings = config.Bool("tie_word_embeddings").value_or(false);
  ReadFamily(config, spec);
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
  if (const json* quantization = config.Object("quantization_config")) {
    const ConfigReader reader(*quantization, "quantization_config.", problems);
    config.AddProblem(
        "quantization_config",
        absl::StrCat("weights quantised by \"", reader.String("quant_method").value_or("?"),
                     "\" are not supported; GGUF's block types are"));
  }
  if (shape_known) {
    for (std::string& problem : FindSpecProblems(spec)) problems.push_back(std::move(problem));
  }
  RETURN_IF_ERROR(ProblemsToStatus(file_name, problems));
  return spec;
}

}  // namespace heddle
