// generation_config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// What the checkpoint's author suggests; flags and requests override it.
struct GenerationDefaults {
  std::vector<int32_t> eos_token_ids;  // what ends a sequence; the config's where none are given
  std::optional<bool> do_sample;       // false = greedy whatever the rest says
  std::optional<double> temperature;
  std::optional<int64_t> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
};

// InvalidArgument lists every field of the wrong type or outside its range.
absl::StatusOr<GenerationDefaults> ParseGenerationConfig(absl::string_view json,
                                                         absl::string_view file_name,
                                                         int64_t vocab_size);

}  // namespace heddle
