// The experts of a config.json.
#pragma once

#include "runtime/model/config_reader.h"
#include "runtime/model/model_spec.h"

namespace heddle {

// Sizes and layers of the experts of `spec.model_type`; nothing if the family has none or no layer
// does. `spec` is known as far as its shape. Included by model_config.cc only, as the next.
std::optional<MoeSpec> ReadExperts(const ConfigReader& config, const ModelSpec& spec);

// How the family's routers choose, into `moe`, which ReadExperts returned. Keys that would change
// the choice in a way that no reference of the family defines are problems.
void ReadRouting(const ConfigReader& config, const ModelSpec& spec, MoeSpec& moe);

}  // namespace heddle
