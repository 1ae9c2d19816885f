#include "cache/page_table.h"

#include <xxhash.h>

namespace heddle {

static_assert(sizeof(PageLocation) == 2 * sizeof(int32_t), "hashed as bytes: no padding");

uint64_t DigestPageTable(int32_t batch_slot, const PageTable& table) {
  if (table.pages.empty()) return 0;
  const int64_t place[] = {batch_slot, table.first_page};
  const uint64_t seed = XXH3_64bits(place, sizeof(place));
  return XXH3_64bits_withSeed(table.pages.data(), table.pages.size() * sizeof(PageLocation), seed);
}

}  // namespace heddle
