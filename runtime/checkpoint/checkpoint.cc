#include "runtime/checkpoint/checkpoint.h"

#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "runtime/checkpoint/dummy_weights.h"
#include "runtime/checkpoint/gguf.h"
#include "runtime/checkpoint/gguf_model.h"
#include "runtime/checkpoint/hugging_face.h"
#include "runtime/checkpoint/mapped_file.h"
#include "runtime/checkpoint/mapped_weights.h"

namespace heddle {
namespace {

namespace fs = std::filesystem;

constexpr char kConfigName[] = "config.json";

// Tensors that the spec has already taken up.
bool IsMetadataTensor(absl::string_view name) { return name == "rope_freqs.weight"; }

absl::StatusOr<Checkpoint> OpenGguf(const std::string& path) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
  ASSIGN_OR_RETURN(GgufFile gguf, ParseGguf(file->contents(), path));
  Checkpoint checkpoint;
  ASSIGN_OR_RETURN(checkpoint.spec, GgufModelSpec(gguf, file->contents(), path));
  if (gguf.metadata.contains("tokenizer.ggml.model")) {
    ASSIGN_OR_RETURN(checkpoint.gguf_vocabulary, ReadGgufVocabulary(gguf, path));
  } else {
    checkpoint.tokenizer_directory = (fs::path(".") / path).parent_path().string();
  }
  checkpoint.generation.eos_token_ids = checkpoint.spec.eos_token_ids;

  std::vector<MappedTensor> tensors;
  for (StoredTensor& tensor : gguf.tensors) {
    if (IsMetadataTensor(tensor.name)) continue;
    tensor.name = HuggingFaceName(tensor.name);
    tensors.push_back({std::move(tensor), file});
  }
  ASSIGN_OR_RETURN(checkpoint.weights, MapWeights(checkpoint.spec, std::move(tensors), path));
  return checkpoint;
}

// A directory with a config.json, or nothing but that file.
absl::StatusOr<Checkpoint> OpenConfig(const std::string& directory) {
  Checkpoint checkpoint;
  ASSIGN_OR_RETURN(checkpoint.spec, ReadModelConfig(absl::StrCat(directory, "/", kConfigName)));
  ASSIGN_OR_RETURN(checkpoint.generation,
                   ReadGenerationConfig(directory, checkpoint.spec.vocab_size));
  if (checkpoint.generation.eos_token_ids.empty()) {
    checkpoint.generation.eos_token_ids = checkpoint.spec.eos_token_ids;
  }
  checkpoint.tokenizer_directory = directory;
  return checkpoint;
}

absl::StatusOr<Checkpoint> OpenHuggingFace(const std::string& directory) {
  ASSIGN_OR_RETURN(Checkpoint checkpoint, OpenConfig(directory));
  ASSIGN_OR_RETURN(std::vector<MappedTensor> tensors, MapSafetensors(directory));
  ASSIGN_OR_RETURN(checkpoint.weights, MapWeights(checkpoint.spec, std::move(tensors), directory));
  return checkpoint;
}

absl::StatusOr<Checkpoint> OpenDummy(const std::string& directory, uint64_t seed) {
  ASSIGN_OR_RETURN(Checkpoint checkpoint, OpenConfig(directory));
  checkpoint.weights = MakeDummyWeights(checkpoint.spec, seed);
  return checkpoint;
}

// What to do about a directory without a config.json.
absl::Status NoConfigError(const std::string& directory) {
  std::vector<std::string> gguf_files;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".gguf") gguf_files.push_back(it->path().filename().string());
  }
  return absl::NotFoundError(absl::StrCat(directory, " has no ", kConfigName,
                                          gguf_files.empty()
                                              ? ": it is not a Hugging Face model"
                                              : "; to run a GGUF file give its own path: ",
                                          absl::StrJoin(gguf_files, ", ")));
}

}  // namespace

absl::StatusOr<LoadFormat> ParseLoadFormat(absl::string_view name) {
  if (name == "auto") return LoadFormat::kAuto;
  if (name == "safetensors") return LoadFormat::kSafetensors;
  if (name == "gguf") return LoadFormat::kGguf;
  if (name == "dummy") return LoadFormat::kDummy;
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown load format \"", name, "\"; known are auto, safetensors, gguf and dummy"));
}

absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& path, LoadFormat format,
                                          uint64_t seed) {
  std::error_code error;
  const bool is_directory = fs::is_directory(path, error);
  if (!is_directory && !fs::exists(path, error)) {
    return absl::NotFoundError(absl::StrCat("there is no model at ", path));
  }
  if (format == LoadFormat::kGguf || (format == LoadFormat::kAuto && !is_directory)) {
    return OpenGguf(path);
  }
  std::string directory = path;
  if (!is_directory) {
    const fs::path file(path);
    if (format != LoadFormat::kDummy || file.filename() != kConfigName) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, " is a file; give the directory of a Hugging Face model, or a .gguf file"));
    }
    directory = file.has_parent_path() ? file.parent_path().string() : ".";
  }
  if (!fs::exists(absl::StrCat(directory, "/", kConfigName), error)) {
    return NoConfigError(directory);
  }
  return format == LoadFormat::kDummy ? OpenDummy(directory, seed) : OpenHuggingFace(directory);
}

}  // namespace heddle
