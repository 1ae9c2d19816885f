// How much of its node's memory a CPU rank may take, and how much of that the cache gets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "parallel/world.h"

namespace heddle {

// Bytes that this process could still take: what the node has available, or what the control groups
// it is in leave it (containers, Slurm), whichever is less. `root` is where /proc and /sys lie.
int64_t FreeMemory(const std::string& root = "");

// Where the number of pages comes from. The first that is set decides.
struct CacheBudget {
  std::optional<int64_t> num_pages = std::nullopt;     // --num-kv-pages, exactly
  std::optional<int64_t> memory_bytes = std::nullopt;  // --kv-cache-memory-bytes
  std::optional<double> utilization = std::nullopt;  // --gpu-memory-utilization, of the free memory
};

// What the cache of one rank could be for.
struct CacheNeed {
  int64_t bytes_per_page = 0;    // 0: this rank stores nothing
  int64_t longest_sequence = 0;  // pages of one sequence of the greatest length
  int64_t whole_batch = 0;       // pages of as many as may run at once: there is no use for more
  int64_t free_memory = 0;       // bytes left to this rank beside its weights
};

// Pages of a rank. If nothing is set, a CPU rank leaves memory to the rest of its node: it takes
// 4 GiB, or what one sequence of the greatest length needs if that is more, and never above 0.9 of
// what is free. ResourceExhausted, with the figures, for less than a page or more than is free.
absl::StatusOr<int64_t> ChooseNumPages(const CacheBudget& budget, const CacheNeed& need);

struct RankMemory {
  std::string host;
  int64_t bytes = 0;
};

// A warning if one rank has less than half the memory of another, since the smallest bounds what
// all can hold; empty if not. `ranks` in rank order.
std::string DescribeUnequalMemory(const std::vector<RankMemory>& ranks);

// Collective: rank 0 logs that warning.
absl::Status WarnOfUnequalMemory(int64_t own_bytes, World& world);

}  // namespace heddle
