#include "parallel/host_group.h"

#include <algorithm>

#include "parallel/slot_board.h"

namespace heddle {
namespace {

constexpr size_t kSlotBytes = 32 << 10;
constexpr size_t kSlotBytesAcrossNodes = 64 << 10;

}  // namespace

HostGroup::HostGroup(const std::vector<RankPlace>& places, std::vector<int> members_in, int self)
    : members(std::move(members_in)) {
  std::vector<int> world_nodes;  // of each entry of `nodes`
  for (int r = 0; r < size(); ++r) {
    const int world_node = places[members[r]].node;
    const auto known = std::find(world_nodes.begin(), world_nodes.end(), world_node);
    const size_t index = known - world_nodes.begin();
    if (known == world_nodes.end()) {
      world_nodes.push_back(world_node);
      nodes.emplace_back();
    }
    nodes[index].push_back(r);
    if (members[r] == self) {
      rank = r;
      node = static_cast<int>(index);
    }
  }
  num_owners = size();
  for (const std::vector<int>& on_node : nodes) {
    num_owners = std::min(num_owners, static_cast<int>(on_node.size()));
  }
}

size_t HostGroup::SlotBytes() const { return one_node() ? kSlotBytes : kSlotBytesAcrossNodes; }

size_t HostGroup::ResultBytes() const {
  const int64_t floats = SlotBytes() / sizeof(float);
  return PartOf(0, floats).size() * sizeof(float);
}

size_t HostGroup::WindowBytes(int of_node) const {
  if (size() == 1) return 0;  // It has nobody to share anything with.
  return SlotBoard::BytesFor(static_cast<int>(nodes[of_node].size()), SlotBytes(), ResultBytes());
}

std::vector<int> HostGroup::MembersHere() const {
  std::vector<int> world_ranks;
  for (const int r : nodes[node]) world_ranks.push_back(members[r]);
  return world_ranks;
}

}  // namespace heddle
