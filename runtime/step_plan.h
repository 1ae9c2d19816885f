// What rank 0 tells every rank to do in one step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/page_table.h"
#include "runtime/sampling/sampling_params.h"

namespace heddle {

// A sequence takes a row of the persistent batch: admission, or resume after a preemption. Ranks
// rebuild penalty counts and the random stream from this, so a resume continues as if nothing
// had happened.
struct SlotAdmission {
  int32_t batch_slot = 0;
  SamplingParams params;
  uint64_t seed = 0;          // of the sequence: request seed and sample index are mixed in
  int64_t prompt_length = 0;  // tokens of token_ids that are prompt; the rest is output
  std::vector<int32_t> token_ids;
};

// The page table of a batch slot grows, or loses leading pages that left the window.
struct PageTableDelta {
  int32_t batch_slot = 0;
  bool reset = false;             // start from an empty table at page 0 (admission)
  int32_t num_dropped_front = 0;  // pages released from the front; after a reset: never held
  std::vector<PageLocation> appended = {};
};

// InvalidArgument if more pages are dropped than there are.
absl::Status ApplyPageTableDelta(const PageTableDelta& delta, PageTable* table);

// Moves of page contents, run before the step's appends. No page is both a source and a target.
struct PageOp {
  enum class Kind : uint8_t { kCopy = 0 };
  Kind kind = Kind::kCopy;
  PageLocation source;
  PageLocation target;  // the source's stripe
};

// A run of consecutive tokens of one sequence. Token ids come from the slot's history, which every
// rank keeps: what admission brought and what was sampled since.
struct PlanRow {
  int32_t batch_slot = 0;
  int32_t query_length = 0;    // >= 1
  int32_t first_position = 0;  // of the run's first token
  bool sample = false;         // the run ends the known tokens: sample the next one
};

// Applied in the order of the fields. Rows are decodes first, then prefill chunks. The epoch is the
// last one plus one; anything else aborts the job, since a rank that refuses alone would hang the
// rest.
struct StepPlan {
  uint64_t epoch = 0;
  bool shutdown = false;                // the last plan: ranks return
  std::vector<int32_t> released_slots;  // finished, aborted or preempted since the last plan
  std::vector<SlotAdmission> admissions;
  std::vector<PageTableDelta> page_deltas;
  std::vector<PageOp> page_ops;
  std::vector<PlanRow> rows;
  // Of rank 0's page tables after this plan's deltas; compared by each rank when set.
  bool has_digest = false;
  uint64_t page_table_digest = 0;

  int64_t NumTokens() const;
};

// A version byte, then the fields in order, little-endian.
std::string SerializeStepPlan(const StepPlan& plan);
// InvalidArgument for another version, short or trailing bytes; counts are checked against the
// bytes that are left before anything is allocated.
absl::StatusOr<StepPlan> ParseStepPlan(absl::string_view bytes);

}  // namespace heddle
