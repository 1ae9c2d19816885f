// Who belongs to a communicator of CPU ranks, and where they live.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel/endpoint.h"
#include "parallel/shard_spec.h"

namespace heddle {

// Parts of a row are cut at whole lines of the cache.
inline constexpr int64_t kFloatsPerLine = 16;

// Immutable; the same on all members but for `rank` and `node`.
struct HostGroup {
  // `members` are world ranks in group order; `self` is one of them.
  HostGroup(const std::vector<RankPlace>& places, std::vector<int> members, int self);

  int size() const { return static_cast<int>(members.size()); }
  int num_nodes() const { return static_cast<int>(nodes.size()); }
  bool one_node() const { return nodes.size() == 1; }
  size_t SlotBytes() const;
  size_t ResultBytes() const;
  // What the group takes of the window of a node that holds some of its members.
  size_t WindowBytes(int node) const;

  // What the `owner`-th member of each node reduces of a piece of `num_floats`.
  Range PartOf(int owner, int64_t num_floats) const {
    return SplitInBlocks(num_floats, kFloatsPerLine, num_owners, owner);
  }
  // World ranks of the members on the own node.
  std::vector<int> MembersHere() const;

  std::vector<int> members;             // world rank of each group rank
  std::vector<std::vector<int>> nodes;  // group ranks on each node, both in group order
  int rank = 0;                         // own group rank
  int node = 0;                         // own index into `nodes`
  // On each node the first so many members reduce; the i-th of each node reduce the same columns.
  int num_owners = 1;
};

}  // namespace heddle
