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

// Collective: the fair number of threads of this rank by the affinity masks of all. Warns when
// ranks outnumber the CPUs they share.
absl::StatusOr<int> AgreeOnThreads(World& world);

}  // namespace heddle
