// How the work of one call of paged attention is cut into tasks for the threads of a CPU rank.
//
// Chunks lie at fixed global positions and are folded in ascending order, so whichever thread
// computes a chunk, and whether its result goes through memory, the bits are the same.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/attention/gqa_attention.h"

namespace heddle {

// Rows are (token, query head of the group) pairs, token-major; a row's state is its running
// (output, maximum, sum).
struct GqaTask {
  int64_t sequence = 0;
  int64_t kv_head = 0;
  int64_t first_token = 0;  // of the step
  int64_t num_tokens = 0;
  int64_t first_chunk = 0;  // chunks that some row may see
  int64_t end_chunk = 0;
  // Where the states of the task's first chunk go, in rows; -1: the task sees the whole context of
  // its rows and writes their output itself.
  int64_t partial_row = -1;
};

// Rows whose context was split: num_chunks times (num_tokens * group) states, in order.
struct GqaMerge {
  int64_t kv_head = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  int64_t partial_row = 0;
  int64_t num_chunks = 0;
};

struct GqaPlan {
  std::vector<GqaTask> tasks;
  std::vector<GqaMerge> merges;
  int64_t num_partial_rows = 0;
  int64_t max_rows = 0;  // of a task
};

// Reads the step's arrays, so it runs when the stream does. Fails on arrays that are out of range
// or out of order.
absl::StatusOr<GqaPlan> PlanGqa(const GqaAttentionArgs& args, int num_threads);

}  // namespace heddle
