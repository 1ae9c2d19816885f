#include "runtime/model/rope_config.h"

#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace heddle {
namespace {

using nlohmann::json;

constexpr double kMixtralTheta = 1e6;

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

// DeepSeek-V2 always pairs neighbours; the configs of its successors may say otherwise.
bool IsInterleaved(const ConfigReader& config, const ModelSpec& spec) {
  if (!spec.mla) return false;
  const bool interleaved = config.Bool("rope_interleave").value_or(true);
  if (!interleaved && spec.model_type == "deepseek_v2") {
    config.AddProblem("rope_interleave", "only true is supported for deepseek_v2");
    return true;
  }
  return interleaved;
}

// DeepSeek's own code and transformers rotate differently where only one of the two is given; both
// take absent ones for 1 and 0. They mean nothing to scalings other than YaRN's.
void CheckMlaMagnitudes(const ConfigReader& parameters, RopeSpec::Scaling scaling) {
  const std::optional<double> mscale = parameters.Number("mscale");
  const std::optional<double> mscale_all_dim = parameters.Number("mscale_all_dim");
  if (scaling != RopeSpec::Scaling::kYarn) {
    if (mscale_all_dim.value_or(0.0) != 0.0) {
      parameters.AddProblem("mscale_all_dim", "has a meaning only where rope_type is \"yarn\"");
    }
    return;
  }
  const bool both = mscale.value_or(0.0) != 0.0 && mscale_all_dim.value_or(0.0) != 0.0;
  const bool as_absent = mscale.value_or(1.0) == 1.0 && mscale_all_dim.value_or(0.0) == 0.0;
  if (!both && !as_absent) {
    parameters.AddProblem("mscale", "must be given together with mscale_all_dim, both above 0");
  }
}

}  // namespace

RopeSpec ReadRope(const ConfigReader& config, const ModelSpec& spec,
                  std::vector<std::string>& problems) {
  RopeSpec rope;
  rope.rotary_dim = spec.mla ? spec.mla->qk_rope_head_dim : spec.head_dim;
  rope.interleaved = IsInterleaved(config, spec);

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
  rope.theta = inner_or_outer("rope_theta", spec.model_type == "mixtral" ? kMixtralTheta : 1e4);
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
  if (spec.mla) CheckMlaMagnitudes(parameters, rope.scaling);
  return rope;
}

}  // namespace heddle
