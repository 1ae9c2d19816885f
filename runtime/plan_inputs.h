// Turns a step plan into what the decoder reads of it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/model/step_inputs.h"
#include "runtime/page_table_mirror.h"
#include "runtime/sampling/sequence_state.h"
#include "runtime/step_plan.h"

namespace heddle {

// Where the tokens of a plan row are in the step. Those from `absorbed_position` on lie apart.
struct RowTokens {
  int64_t first_position = 0;
  int64_t first_token = 0;        // of first_position, unless that is absorbed
  int64_t absorbed_position = 0;  // the row's end if nothing is
  int64_t absorbed_token = 0;     // of absorbed_position

  int64_t TokenAt(int64_t position) const {
    return position < absorbed_position ? first_token + position - first_position
                                        : absorbed_token + position - absorbed_position;
  }
};

// A plan's shape and order; its contents are in the StepInputs.
struct PlanInputs {
  StepShape shape;
  std::vector<RowTokens> rows;                // [plan rows]
  std::vector<const SequenceState*> sampled;  // of the rows that sample, in the plan's order
};

struct PlanInputsOptions {
  StepLimits limits;
  int64_t page_size = 0;
  int stripe = 0;  // whose pages this rank holds
  int num_stripes = 1;
  bool dp_attention = false;    // a row's tokens are those of the rank that has its pages
  bool has_cache = true;        // else nothing is stored, and rows are whole sequences
  bool mla = false;             // see StepShape; without a cache nothing is absorbed
  bool absorb_prompts = false;  // as if they were generated tokens
};

// `slots` are those of the persistent batch. Internal, naming what is wrong, for a plan that cannot
// follow the ones before.
absl::StatusOr<PlanInputs> FillPlanInputs(const StepPlan& plan, const PlanInputsOptions& options,
                                          const std::vector<std::optional<SequenceState>>& slots,
                                          const PageTableMirror& tables, const StepInputs& inputs);

}  // namespace heddle
