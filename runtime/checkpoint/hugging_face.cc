#include "runtime/checkpoint/hugging_face.h"

#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"
#include "runtime/checkpoint/mapped_file.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/model/problem_list.h"
#include "runtime/model/strict_json.h"

namespace heddle {
namespace {

using nlohmann::json;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr size_t kMaxJsonBytes = size_t{256} << 20;  // ten times the largest index there is

// Shard file → names of its tensors.
using ShardMap = std::map<std::string, std::vector<std::string>>;

bool Exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

absl::StatusOr<std::shared_ptr<const MappedFile>> OpenJson(const std::string& path) {
  ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
  const std::string guess = GuessFileFault(file->contents());
  if (!guess.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", guess));
  if (file->contents().size() > kMaxJsonBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", file->contents().size(),
                                                   " bytes; at most ", kMaxJsonBytes,
                                                   " are read as JSON"));
  }
  return file;
}

// A plain name, so that an index cannot reach outside its directory.
bool IsPlainFileName(absl::string_view name) {
  return !name.empty() && name != "." && name != ".." && !absl::StrContains(name, '/') &&
         !absl::StrContains(name, '\0');
}

absl::StatusOr<ShardMap> ReadIndex(const std::string& path) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, OpenJson(path));
  ASSIGN_OR_RETURN(const json root, ParseStrictJson(file->contents(), path));
  const auto weight_map = root.is_object() ? root.find("weight_map") : root.end();
  if (weight_map == root.end() || !weight_map->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map is not an object"));
  }
  ShardMap shards;
  std::vector<std::string> problems;
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (shard.is_string() && IsPlainFileName(shard.get_ref<const std::string&>())) {
      shards[shard.get<std::string>()].push_back(tensor);
    } else {
      problems.push_back(absl::StrCat("weight_map.", tensor, ": not the name of a file beside it"));
    }
  }
  RETURN_IF_ERROR(ProblemsToStatus(path, problems));
  return shards;
}

absl::Status CheckShardsExist(const std::string& directory, const ShardMap& shards) {
  std::vector<std::string> missing;
  for (const auto& [shard, tensors] : shards) {
    if (!Exists(absl::StrCat(directory, "/", shard))) missing.push_back(shard);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(
      directory, " lacks ", missing.size(), " of the ", shards.size(), " files that ", kIndexName,
      " names: ", absl::StrJoin(missing, ", "), "; was the download interrupted?"));
}

absl::StatusOr<std::vector<MappedTensor>> MapFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
  ASSIGN_OR_RETURN(std::vector<StoredTensor> stored, ParseSafetensors(file->contents(), path));
  std::vector<MappedTensor> tensors;
  tensors.reserve(stored.size());
  for (StoredTensor& tensor : stored) tensors.push_back({std::move(tensor), file});
  return tensors;
}

absl::StatusOr<std::vector<MappedTensor>> MapShards(const std::string& directory,
                                                    const ShardMap& shards) {
  std::vector<MappedTensor> tensors;
  std::vector<std::string> problems;
  for (const auto& [shard, names] : shards) {
    absl::StatusOr<std::vector<MappedTensor>> mapped = MapFile(absl::StrCat(directory, "/", shard));
    if (!mapped.ok()) {
      problems.push_back(std::string(mapped.status().message()));
      continue;
    }
    absl::flat_hash_map<std::string, MappedTensor*> by_name;
    for (MappedTensor& tensor : *mapped) by_name.emplace(tensor.stored.name, &tensor);
    // Tensors of the shard that the index does not place there are no part of the checkpoint.
    for (const std::string& name : names) {
      const auto it = by_name.find(name);
      if (it == by_name.end()) {
        problems.push_back(absl::StrCat("tensor ", name, " is not in ", shard, ", where ",
                                        kIndexName, " places it"));
      } else {
        tensors.push_back(std::move(*it->second));
      }
    }
  }
  RETURN_IF_ERROR(ProblemsToStatus(directory, problems));
  return tensors;
}

}  // namespace

absl::StatusOr<ModelSpec> ReadModelConfig(const std::string& path) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, OpenJson(path));
  return ParseModelConfig(file->contents(), path);
}

absl::StatusOr<GenerationDefaults> ReadGenerationConfig(const std::string& directory,
                                                        int64_t vocab_size) {
  const std::string path = absl::StrCat(directory, "/generation_config.json");
  if (!Exists(path)) return GenerationDefaults();
  ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, OpenJson(path));
  return ParseGenerationConfig(file->contents(), path, vocab_size);
}

absl::StatusOr<std::vector<MappedTensor>> MapSafetensors(const std::string& directory) {
  const std::string index_path = absl::StrCat(directory, "/", kIndexName);
  if (Exists(index_path)) {
    ASSIGN_OR_RETURN(const ShardMap shards, ReadIndex(index_path));
    RETURN_IF_ERROR(CheckShardsExist(directory, shards));
    return MapShards(directory, shards);
  }
  const std::string single_path = absl::StrCat(directory, "/", kSingleName);
  if (Exists(single_path)) return MapFile(single_path);
  return absl::NotFoundError(
      absl::StrCat(directory, " has neither ", kSingleName, " nor ", kIndexName,
                   Exists(absl::StrCat(directory, "/pytorch_model.bin")) ||
                           Exists(absl::StrCat(directory, "/pytorch_model.bin.index.json"))
                       ? "; convert its pytorch_model.bin to safetensors"
                       : "; use the load format \"dummy\" for random weights"));
}

}  // namespace heddle
