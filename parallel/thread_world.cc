#include "parallel/thread_world.h"

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/cpu/thread_pool.h"
#include "parallel/host_world.h"
#include "parallel/thread_link.h"

namespace heddle {
namespace {

class HostThreadWorld : public ThreadWorld {
 public:
  explicit HostThreadWorld(const ThreadWorldOptions& options)
      : ThreadWorld(options.size), joined_(options.size) {
    const int per_node = options.ranks_per_node > 0 ? options.ranks_per_node : options.size;
    for (int rank = 0; rank < options.size; ++rank) {
      const int node = rank / per_node;
      places_.push_back({node, rank % per_node, absl::StrCat("node", node)});
    }
    for (int node = 0; node <= places_.back().node; ++node) {
      windows_.push_back(AllocateHeapWindow(HostWindowBytes(places_, node)));
      FormatHostWindow(windows_.back().get(), places_, node);
    }
    options_.progress_timeout_seconds = options.progress_timeout_seconds;
    options_.yields = options.size > NumAllowedCpus();
  }

  World Join(int rank) override {
    CHECK(!joined_[rank].exchange(true)) << "rank " << rank << " joined twice";
    return MakeHostWorld(rank, places_, windows_[places_[rank].node], post_.LinkOf(rank), options_);
  }

 private:
  std::vector<RankPlace> places_;
  std::vector<std::shared_ptr<void>> windows_;  // of each node
  std::vector<std::atomic<bool>> joined_;
  ThreadPost post_;
  HostWorldOptions options_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ThreadWorld>> ThreadWorld::Create(
    const ThreadWorldOptions& options) {
  if (options.size < 1 || options.ranks_per_node < 0 || !(options.progress_timeout_seconds > 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a world needs at least one rank and a timeout above zero, not ", options.size, " ranks, ",
        options.ranks_per_node, " a node, and ", options.progress_timeout_seconds, " s"));
  }
  return std::make_unique<HostThreadWorld>(options);
}

std::vector<absl::Status> ThreadWorld::Run(const std::function<absl::Status(World& world)>& body) {
  std::vector<absl::Status> statuses(size_);
  std::vector<std::thread> threads;
  threads.reserve(size_);
  for (int rank = 0; rank < size_; ++rank) {
    threads.emplace_back([this, rank, &statuses, &body] {
      World world = Join(rank);
      statuses[rank] = body(world);
      if (!statuses[rank].ok()) world.control->Abort(statuses[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

}  // namespace heddle
