#include "runtime/cpu_share.h"

#include <sched.h>

#include <algorithm>
#include <utility>

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

}  // namespace

int FairThreads(const std::vector<RankCpus>& ranks, int rank) {
  double share = 0.0;
  for (const int cpu : ranks[rank].cpus) {
    int num_users = 0;
    for (const RankCpus& other : ranks) {
      num_users += other.node_index == ranks[rank].node_index &&
                   std::binary_search(other.cpus.begin(), other.cpus.end(), cpu);
    }
    share += 1.0 / num_users;
  }
  return std::max(1, static_cast<int>(share + 1e-6));
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
  const int threads = FairThreads(ranks, world.self.rank);
  if (world.self.node_size > 1 && static_cast<size_t>(world.self.node_size) > own.size() &&
      world.self.node_rank == 0) {
    LOG(WARNING) << "some of the " << world.self.node_size << " ranks of " << world.self.host
                 << " share a CPU (this one may use " << own.size()
                 << "); they take turns. mpirun --map-by slot:PE=N gives each rank N of its own";
  }
  return threads;
}

}  // namespace heddle
