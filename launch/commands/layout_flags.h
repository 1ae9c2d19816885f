// What inspect, plan and bench batch share: how a model is held, as flags and in words.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "launch/command_line.h"
#include "runtime/cost_model.h"
#include "runtime/device_table.h"
#include "runtime/model/model_spec.h"
#include "runtime/shard_layout.h"

namespace heddle {

// All but kv_cache_dtype, whose default depends on the device. `auto` is one stripe here.
absl::StatusOr<ShardLayoutOptions> LayoutOptionsOf(const CommandLine& line, const ModelSpec& spec);

// Bytes of a rank for weights and cache.
absl::StatusOr<double> MemoryOf(const CommandLine& line, const DeviceFigures& device);

// Tokens cached of a sequence on average: --expected-context-len, or half of the longest.
absl::StatusOr<int64_t> ExpectedContext(const CommandLine& line, const ModelSpec& spec);

// "replicated", "4 stripes", ...
std::string PlacementName(const ModelSpec& spec, const Placement& placement);

// "1.5 GiB"
std::string BytesText(double bytes);

}  // namespace heddle
