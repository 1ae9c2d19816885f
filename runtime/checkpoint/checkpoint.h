// Opens a model on disk: a Hugging Face directory, a GGUF file, or a config alone (dummy).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"

namespace heddle {

struct GgufVocabulary;  // runtime/text/tokenizer.h

enum class LoadFormat { kAuto, kSafetensors, kGguf, kDummy };
absl::StatusOr<LoadFormat> ParseLoadFormat(absl::string_view name);

// What the checkpoint's author suggests (generation_config.json); flags and requests override it.
struct GenerationDefaults {
  std::vector<int32_t> eos_token_ids;  // what ends a sequence; the config's where none are given
  std::optional<bool> do_sample;       // false = greedy whatever the rest says
  std::optional<double> temperature;
  std::optional<int64_t> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
};

struct Checkpoint {
  ModelSpec spec;
  std::unique_ptr<WeightSource> weights;
  GenerationDefaults generation;
  // Where the tokenizer's files are (Hugging Face and dummy), or what a GGUF file says of it.
  std::string tokenizer_directory;
  std::shared_ptr<const GgufVocabulary> gguf_vocabulary;
};

// Reads headers and metadata only; whatever is wrong with them is found here, all of it at once.
// kAuto takes a file whose name ends in .gguf as GGUF and anything else as safetensors. `seed`
// is used by kDummy, whose weights are a function of (seed, tensor name, global element index).
absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& path, LoadFormat format,
                                          uint64_t seed);

}  // namespace heddle
