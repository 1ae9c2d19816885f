#include "runtime/cpu_share.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

std::vector<int> AllowedCpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
    }
  }
  return cpus;
}

// How many CPUs' worth of time a rank has.
double CpuShare(const std::vector<RankCpus>& ranks, int rank) {
  double share = 0.0;
  for (const int cpu : ranks[rank].cpus) {
    int num_users = 0;
    for (const RankCpus& other : ranks) {
      num_users += other.node_index == ranks[rank].node_index &&
                   std::binary_search(other.cpus.begin(), other.cpus.end(), cpu);
    }
    share += 1.0 / num_users;
  }
  return share + 1e-6;  // thirds add up to one
}

}  // namespace

int FairThreads(const std::vector<RankCpus>& ranks, int rank) {
  return std::max(1, static_cast<int>(CpuShare(ranks, rank)));
}

std::string DescribeBinding(const std::vector<RankCpus>& ranks, int node_index, int num_cpus) {
  int num_ranks = 0;
  int num_crowded = 0;
  std::set<int> used;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (ranks[rank].node_index != node_index) continue;
    ++num_ranks;
    num_crowded += CpuShare(ranks, rank) < 1.0;
    used.insert(ranks[rank].cpus.begin(), ranks[rank].cpus.end());
  }
  const bool mostly_idle = 2 * std::ssize(used) <= num_cpus;
  if (num_crowded == 0 && !mostly_idle) return "";
  std::string warning = absl::StrCat("the ", num_ranks, " rank(s) of this node may use ",
                                     used.size(), " of its ", num_cpus, " CPUs");
  if (num_crowded > 0) {
    absl::StrAppend(&warning, ", and ", num_crowded,
                    " of them have less than one each: they take turns");
  }
  if (mostly_idle) {
    absl::StrAppend(&warning,
                    "; mpirun ties each rank to a core by default: --bind-to none lets them have "
                    "all, --map-by slot:PE=N gives each rank N of its own");
  }
  return warning;
}

absl::StatusOr<int> AgreeOnThreads(World& world) {
  const std::vector<int> own = AllowedCpus();
  ASSIGN_OR_RETURN(
      const std::vector<std::string> gathered,
      world.control->Gather(absl::StrCat(world.self.node_index, ",", absl::StrJoin(own, ","))));
  std::string message = absl::StrJoin(gathered, ";");
  RETURN_IF_ERROR(world.control->Broadcast(message));
  std::vector<RankCpus> ranks;
  for (const absl::string_view text : absl::StrSplit(message, ';')) {
    std::vector<int> numbers;
    for (const absl::string_view number : absl::StrSplit(text, ',', absl::SkipEmpty())) {
      if (!absl::SimpleAtoi(number, &numbers.emplace_back())) {
        return absl::InternalError(absl::StrCat("CPU mask of a rank is garbled: ", text));
      }
    }
    ranks.push_back({numbers.at(0), {numbers.begin() + 1, numbers.end()}});
  }
  if (world.self.node_rank == 0) {
    const std::string warning = DescribeBinding(ranks, world.self.node_index,
                                                static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
    if (!warning.empty()) LOG(WARNING) << warning;
  }
  return FairThreads(ranks, world.self.rank);
}

}  // namespace heddle
