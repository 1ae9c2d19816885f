// Parses config.json texts, and what comes of it.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "runtime/model/model_spec.h"

namespace heddle {

nlohmann::json With(nlohmann::json config, const nlohmann::json& changes);

// Fails the test if `config` is refused.
ModelSpec Parse(const nlohmann::json& config);

// The message that refuses it; fails the test if it is not refused as invalid.
std::string Error(const nlohmann::json& config);
std::string ErrorOfText(absl::string_view text);

std::vector<std::string> TensorNames(const ModelSpec& spec);

}  // namespace heddle
