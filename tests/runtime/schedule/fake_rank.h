// A rank and its model without arithmetic, so that a wrong page shows as a wrong token.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "cache/page_table.h"
#include "runtime/schedule/scheduler.h"
#include "runtime/step_plan.h"

namespace heddle {

// What the model makes of a sequence: a hash over its tokens, each folded into the hash before it.
uint64_t FoldToken(uint64_t state, int32_t token);
inline constexpr uint64_t kEmptyState = 1;
// The token that follows a sequence in that state.
int32_t NextToken(uint64_t state, uint64_t seed);
inline constexpr int32_t kFakeVocabSize = 3;

// Follows plans as a worker does: mirrors page tables, keeps each slot's tokens, and stores for
// each position the state behind it. A row starts from the state stored before it, so that whatever
// was shared, copied or kept wrongly ends in another token; and all that a row sees is compared
// with what it should be. Violations are test failures.
class FakeRank {
 public:
  explicit FakeRank(const SchedulerOptions& options);

  // The token sampled by each row, if it samples. Goes through the plan's bytes.
  std::vector<std::optional<int32_t>> Execute(const StepPlan& plan);

 private:
  struct Slot {
    SamplingParams params;
    uint64_t seed = 0;
    std::vector<int32_t> tokens;
    int64_t num_computed = 0;
    PageTable table;
  };

  void Enter(const StepPlan& plan);
  void CheckShape(const StepPlan& plan) const;
  std::optional<int32_t> RunRow(const PlanRow& row);
  // The state stored for a position of a slot.
  uint64_t& StateAt(const Slot& slot, int64_t position);

  const SchedulerOptions options_;
  std::map<int32_t, Slot> slots_;
  std::map<std::pair<int32_t, int32_t>, std::vector<uint64_t>> pages_;  // (stripe, slot) → states
};

}  // namespace heddle
