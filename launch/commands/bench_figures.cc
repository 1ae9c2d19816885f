#include "launch/commands/bench_figures.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "launch/version.h"

namespace heddle {

using Json = nlohmann::ordered_json;

double Mean(const std::vector<double>& values) {
  if (values.empty()) return 0.0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double Percentile(std::vector<double> values, double percent) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const double rank = percent / 100.0 * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(rank);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (rank - static_cast<double>(low)) * (values[high] - values[low]);
}

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab_size, std::mt19937_64& random) {
  std::uniform_int_distribution<int32_t> token(
      0, static_cast<int32_t>(std::min<int64_t>(vocab_size, 10'000)) - 1);
  std::vector<int32_t> tokens;
  tokens.reserve(count);
  for (int64_t i = 0; i < count; ++i) tokens.push_back(token(random));
  return tokens;
}

Json BenchHead(const CommandLine& line, const RankInfo& self) {
  return {{"date", absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone())},
          {"version", kHeddleVersion},
          {"model", line.engine.model},
          {"world_size", self.size},
          {"tp", self.size},
          {"num_nodes", self.num_nodes},
          {"hw", "cpu"}};
}

absl::Status CheckPositive(const std::string& flag, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, ": expected at least 1, found ", value));
}

absl::StatusOr<std::shared_ptr<ResultFile>> OpenResult(const std::string& path) {
  if (path.empty()) return std::shared_ptr<ResultFile>();
  ASSIGN_OR_RETURN(std::unique_ptr<ResultFile> file, ResultFile::Open(path));
  return std::shared_ptr<ResultFile>(std::move(file));
}

absl::Status WriteJson(const Json& json, ResultFile* file) {
  if (file == nullptr) return absl::OkStatus();
  // A path of the command line may be no UTF-8.
  file->WriteLine(json.dump(2, ' ', false, Json::error_handler_t::replace));
  return file->Close();
}

}  // namespace heddle
