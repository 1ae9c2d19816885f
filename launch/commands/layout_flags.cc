#include "launch/commands/layout_flags.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/cost_model.h"

namespace heddle {
namespace {

constexpr int64_t kMaxRanks = 1 << 16;        // above what any job has
constexpr double kDefaultUtilization = 0.92;  // vLLM's default

}  // namespace

absl::StatusOr<ShardLayoutOptions> LayoutOptionsOf(const CommandLine& line, const ModelSpec& spec) {
  const int64_t num_ranks = line.parallel.tensor_parallel_size.value_or(1);
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    return absl::InvalidArgumentError(absl::StrCat("--tensor-parallel-size ", num_ranks,
                                                   ": expected 1 to ", kMaxRanks, " ranks"));
  }
  ShardLayoutOptions options;
  options.num_ranks = static_cast<int>(num_ranks);
  options.num_stripes = static_cast<int>(std::min(line.engine.num_stripes.value_or(1), kMaxRanks));
  options.dp_attention = line.engine.enable_dp_attention;
  options.weight_dtype = line.engine.dtype;
  options.page_size = line.engine.block_size > 0 ? line.engine.block_size : DefaultPageSize(spec);
  options.expert_parallel = line.engine.enable_expert_parallel;
  return options;
}

absl::StatusOr<double> MemoryOf(const CommandLine& line, const DeviceFigures& device) {
  const double share = line.engine.memory_utilization.value_or(kDefaultUtilization);
  if (!(share > 0 && share <= 1)) {
    return absl::InvalidArgumentError("--gpu-memory-utilization: expected more than 0, at most 1");
  }
  return share * device.memory_bytes;
}

absl::StatusOr<int64_t> ExpectedContext(const CommandLine& line, const ModelSpec& spec) {
  const int64_t longest =
      line.engine.max_model_len > 0 ? line.engine.max_model_len : spec.max_position_embeddings;
  const int64_t expected = line.parallel.expected_context_len > 0
                               ? line.parallel.expected_context_len
                               : (longest + 1) / 2;
  if (expected > kLongestContext) {
    return absl::InvalidArgumentError(
        absl::StrCat("--expected-context-len ", expected, ": expected at most ", kLongestContext));
  }
  return expected;
}

std::string BytesText(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, bytes, units[unit]);
}

}  // namespace heddle
