// A worker's copy of rank 0's page tables.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cache/page_table.h"
#include "runtime/step_plan.h"

namespace heddle {

// One table a slot of the persistent batch. Owned by the worker. Errors mean that the plan does not
// follow the ones before; the mirror is then undefined and the job must end.
class PageTableMirror {
 public:
  PageTableMirror(int64_t num_slots, int64_t num_stripes, int64_t num_pages)
      : num_stripes_(num_stripes), num_pages_(num_pages), tables_(num_slots) {}

  // Empties the tables of the plan's released slots, then applies its deltas in order.
  absl::Status Apply(const StepPlan& plan);

  const PageTable& table(int32_t batch_slot) const { return tables_[batch_slot]; }
  // The sum of DigestPageTable over the slots.
  uint64_t Digest() const;

 private:
  absl::Status CheckLocation(const PageLocation& location) const;

  int64_t num_stripes_;
  int64_t num_pages_;  // of each stripe
  std::vector<PageTable> tables_;
};

}  // namespace heddle
