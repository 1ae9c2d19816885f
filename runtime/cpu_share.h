// How many threads a CPU rank may run without fighting the other ranks of its node.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "parallel/world.h"

namespace heddle {

// The CPUs a rank may use, and where.
struct RankCpus {
  int node_index = 0;
  std::vector<int> cpus;  // ascending
};

// Each CPU of `ranks[rank]` counts as the part of it that the rank has: 1 / the ranks of the node
// that may use it. At least 1.
int FairThreads(const std::vector<RankCpus>& ranks, int rank);

// A warning about the CPUs that the ranks of a node may use: some have less than one each, or all
// together may use no more than half of the node's. Empty if neither. `num_cpus`: of the node.
std::string DescribeBinding(const std::vector<RankCpus>& ranks, int node_index, int num_cpus);

// Collective: the fair number of threads of this rank by the affinity masks of all. The first rank
// of each node logs the warning about it.
absl::StatusOr<int> AgreeOnThreads(World& world);

}  // namespace heddle
