#include "parallel/host_world.h"

#include <cstdlib>
#include <numeric>

#include "absl/strings/str_format.h"
#include "kernels/base/logging.h"
#include "parallel/host_communicator.h"
#include "parallel/host_control_channel.h"

namespace heddle {
namespace {

// Room for communicators that are split off later: tensor, stripe and expert groups, twice.
constexpr int kSplitGroups = 12;

std::vector<int> Everyone(const std::vector<RankPlace>& places) {
  std::vector<int> ranks(places.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The arena begins with the control channel and the world's communicator, at equal offsets for all.
struct ArenaPlan {
  ArenaPlan(const std::vector<RankPlace>& places, int node)
      : group(places, Everyone(places), /*self=*/0),
        num_ranks(static_cast<int>(group.nodes[node].size())),
        control_bytes(RoundUpToCacheLine(HostControlChannel::WindowBytes(num_ranks))),
        communicator_bytes(RoundUpToCacheLine(group.WindowBytes(node))) {}

  size_t control_offset() const { return NodeWindow::BytesFor(num_ranks, 0); }
  size_t communicator_offset() const { return control_offset() + control_bytes; }
  size_t arena_bytes() const { return control_bytes + (1 + kSplitGroups) * communicator_bytes; }

  HostGroup group;  // nodes in the world's numbering
  int num_ranks;    // of the node
  size_t control_bytes;
  size_t communicator_bytes;
};

}  // namespace

size_t HostWindowBytes(const std::vector<RankPlace>& places, int node) {
  const ArenaPlan plan(places, node);
  return NodeWindow::BytesFor(plan.num_ranks, plan.arena_bytes());
}

void FormatHostWindow(void* memory, const std::vector<RankPlace>& places, int node) {
  const ArenaPlan plan(places, node);
  NodeWindow::Format(memory, plan.num_ranks, plan.arena_bytes());
  NodeWindow window(std::shared_ptr<void>(memory, [](void*) {}));
  const auto control = window.Allocate(plan.control_bytes);
  const auto communicator = window.Allocate(plan.communicator_bytes);
  CHECK(control.ok() && communicator.ok());
  CHECK_EQ(*control, plan.control_offset());
  CHECK_EQ(*communicator, plan.communicator_offset());
  HostControlChannel::Format(window.At(*control), plan.num_ranks);
  if (places.size() > 1) SlotBoard::Format(window.At(*communicator), plan.num_ranks);
}

std::shared_ptr<void> AllocateHeapWindow(size_t bytes) {
  void* memory = std::aligned_alloc(kCacheLineBytes, RoundUpToCacheLine(bytes));
  CHECK(memory != nullptr) << "no memory for a window of " << bytes << " bytes";
  return {memory, std::free};
}

absl::Status CheckSharedMemoryRoom(uint64_t free_bytes, uint64_t needed_bytes) {
  if (needed_bytes <= free_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "the ranks of a node need %.1f MiB of shared memory, but /dev/shm has %.1f MiB free; in a "
      "container raise it, for example by --shm-size=1g",
      needed_bytes / 1048576.0, free_bytes / 1048576.0));
}

World MakeHostWorld(int rank, const std::vector<RankPlace>& places,
                    std::shared_ptr<void> window_memory, std::unique_ptr<PeerLink> link,
                    const HostWorldOptions& options) {
  const ArenaPlan plan(places, places[rank].node);
  auto endpoint = std::make_shared<Endpoint>(rank, places,
                                             std::make_shared<NodeWindow>(std::move(window_memory)),
                                             std::move(link), options.yields);
  World world;
  world.self.rank = rank;
  world.self.size = static_cast<int>(places.size());
  world.self.node_rank = places[rank].node_rank;
  world.self.node_size = plan.num_ranks;
  world.self.node_index = places[rank].node;
  world.self.num_nodes = plan.group.num_nodes();
  world.self.host = places[rank].host;
  world.control = std::make_unique<HostControlChannel>(
      endpoint, plan.control_offset(), options.progress_timeout_seconds, options.terminate_job);
  world.communicator =
      std::make_unique<HostCommunicator>(endpoint, HostGroup(places, Everyone(places), rank),
                                         plan.communicator_offset(), kFirstCommunicatorTag);
  return world;
}

}  // namespace heddle
