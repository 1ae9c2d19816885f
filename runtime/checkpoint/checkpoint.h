// Opens a model on disk: a Hugging Face directory, a GGUF file, or a config alone (dummy).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/generation_defaults.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"
#include "runtime/text/gguf_vocabulary.h"

namespace heddle {

enum class LoadFormat { kAuto, kSafetensors, kGguf, kDummy };
absl::StatusOr<LoadFormat> ParseLoadFormat(absl::string_view name);

struct Checkpoint {
  ModelSpec spec;
  std::unique_ptr<WeightSource> weights;
  GenerationDefaults generation;
  // What a GGUF file says of its tokenizer; else the directory where the tokenizer's files are.
  std::optional<GgufVocabulary> gguf_vocabulary;
  std::string tokenizer_directory;
};

// Reads headers and metadata only; whatever is wrong with them is found here, all of it at once.
// kAuto takes a file as GGUF and a directory as safetensors; kDummy also takes the path of a
// config.json. `seed` is used by kDummy, whose weights are a function of (seed, tensor name,
// global element index).
absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& path, LoadFormat format,
                                          uint64_t seed);

}  // namespace heddle
