#include "runtime/checkpoint/generation_defaults.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"
#include "runtime/model/config_reader.h"
#include "runtime/model/problem_list.h"
#include "runtime/model/strict_json.h"

namespace heddle {
namespace {

// A number in [low, high].
std::optional<double> NumberWithin(const ConfigReader& config, absl::string_view key, double low,
                                   double high) {
  const std::optional<double> number = config.Number(key);
  if (number && !(*number >= low && *number <= high)) {
    config.AddProblem(key,
                      absl::StrCat("is ", *number, "; it must be between ", low, " and ", high));
  }
  return number;
}

}  // namespace

absl::StatusOr<GenerationDefaults> ParseGenerationConfig(absl::string_view text,
                                                         absl::string_view file_name,
                                                         int64_t vocab_size) {
  ASSIGN_OR_RETURN(const nlohmann::json root, ParseStrictJson(text, file_name));
  if (!root.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ": expected a JSON object, found ", root.type_name()));
  }
  std::vector<std::string> problems;
  const ConfigReader config(root, "", problems);

  GenerationDefaults defaults;
  for (const int64_t id : config.Integers("eos_token_id")) {
    if (id < 0 || id >= vocab_size) {
      config.AddProblem("eos_token_id",
                        absl::StrCat(id, " is outside the vocabulary of ", vocab_size));
    } else {
      defaults.eos_token_ids.push_back(static_cast<int32_t>(id));
    }
  }
  defaults.do_sample = config.Bool("do_sample");
  defaults.temperature = NumberWithin(config, "temperature", 0.0, 1e6);
  defaults.top_k = config.Integer("top_k");
  defaults.top_p = NumberWithin(config, "top_p", 0.0, 1.0);
  defaults.min_p = NumberWithin(config, "min_p", 0.0, 1.0);
  defaults.repetition_penalty = NumberWithin(config, "repetition_penalty", 1e-6, 1e6);
  RETURN_IF_ERROR(ProblemsToStatus(file_name, problems));
  return defaults;
}

}  // namespace heddle
