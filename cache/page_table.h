// Which pages a sequence holds, as rank 0 accounts for it and every worker mirrors it.
#pragma once

#include <cstdint>
#include <vector>

namespace heddle {

// Where a page lives: a stripe of the KV grid and a slot of the pools of its ranks.
struct PageLocation {
  int32_t stripe = 0;
  int32_t slot = 0;
  bool operator==(const PageLocation&) const = default;
};

// Entry i is page first_page + i of the sequence and holds the positions from
// (first_page + i) * page_size on. Earlier pages have left the attention window.
struct PageTable {
  int64_t first_page = 0;
  std::vector<PageLocation> pages;

  int64_t end_page() const { return first_page + static_cast<int64_t>(pages.size()); }
};

// The digest of a rank's mirror is the sum (modulo 2^64) of this over its batch slots; an empty
// table gives 0.
uint64_t DigestPageTable(int32_t batch_slot, const PageTable& table);

}  // namespace heddle
