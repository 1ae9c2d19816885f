// The rotary part of a config.json.
#pragma once

#include <string>
#include <vector>

#include "runtime/model/config_reader.h"
#include "runtime/model/model_spec.h"

namespace heddle {

// Reads "rope_scaling" (older) or "rope_parameters" (newer) and what stands beside them. `spec` is
// known as far as its shape and its MLA widths. Included by model_config.cc only.
RopeSpec ReadRope(const ConfigReader& config, const ModelSpec& spec,
                  std::vector<std::string>& problems);

}  // namespace heddle
