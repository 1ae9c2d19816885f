// The files of a Hugging Face directory.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/checkpoint/generation_defaults.h"
#include "runtime/checkpoint/mapped_weights.h"
#include "runtime/model/model_spec.h"

namespace heddle {

absl::StatusOr<ModelSpec> ReadModelConfig(const std::string& path);

// Empty defaults if the directory has no generation_config.json.
absl::StatusOr<GenerationDefaults> ReadGenerationConfig(const std::string& directory,
                                                        int64_t vocab_size);

// Every tensor of model.safetensors.index.json, each from the shard that the index names, or of
// model.safetensors where there is no index. Other files of the directory are never looked at.
// Shards that are missing are listed before one is opened.
absl::StatusOr<std::vector<MappedTensor>> MapSafetensors(const std::string& directory);

}  // namespace heddle
