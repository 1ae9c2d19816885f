#include "launch/commands/layout_flags.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/stripe_choice.h"

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
  return ExpectedContext(line.engine.expected_context_len, longest);
}

std::string PlacementName(const ModelSpec& spec, const Placement& placement) {
  if (placement.dp_attention) return "DP attention";
  if (placement.num_stripes > 1) return absl::StrCat(placement.num_stripes, " stripes");
  if (placement.num_ranks == 1) return "one rank";
  return spec.mla.has_value() ? "replicated" : "heads dealt";
}

std::string BytesText(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, bytes, units[unit]);
}

}  // namespace heddle
