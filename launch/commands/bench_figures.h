// What the benches share: prompts, statistics, and the head and the file of their JSON.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "launch/command_line.h"
#include "launch/commands/result_file.h"
#include "nlohmann/json.hpp"
#include "parallel/world.h"

namespace heddle {

// 0 of nothing, as is the next.
double Mean(const std::vector<double>& values);
// Linear between the two nearest ranks, as numpy's default; `percent` in [0, 100].
double Percentile(std::vector<double> values, double percent);

// As vLLM's: ids below 10,000, away from the special tokens at the end of most vocabularies.
std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab_size, std::mt19937_64& random);

// When, what and where, in vLLM's keys.
nlohmann::ordered_json BenchHead(const CommandLine& line, const RankInfo& self);

// InvalidArgument, naming the flag, below 1.
absl::Status CheckPositive(const std::string& flag, int64_t value);

// Where --output-json goes, opened before the work: null for an empty path; PermissionDenied.
absl::StatusOr<std::shared_ptr<ResultFile>> OpenResult(const std::string& path);
absl::Status WriteJson(const nlohmann::ordered_json& json, ResultFile* file);

}  // namespace heddle
