// How the work of one call of paged attention is cut into tasks for the threads of a CPU rank.
//
// Chunks lie at fixed global positions and are folded in ascending order, so whichever thread
// computes a chunk, and whether its result goes through memory, the bits are the same.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// What there is to do, see the arguments of the ops. Query heads are taken in groups of
// neighbours: those that share a KV head, or some or all of MLA's.
struct AttentionWork {
  absl::string_view op;
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  const int32_t* query_starts = nullptr;
  const int32_t* positions = nullptr;
  int64_t window = 0;
  int64_t page_size = 0;
  const int32_t* page_starts = nullptr;
  const PageSpan* pages = nullptr;
  int64_t chunk = 0;  // tokens
  int64_t num_groups = 0;
  int64_t group_heads = 0;
  int64_t max_rows = 0;  // that share one pass over the context, if a token has no more
  // A context is cut where one thread would else have more than this part of its share of all.
  int64_t tasks_before_splits = 0;
};

// Rows are (token, query head of the group) pairs, token-major; a row's state is its running
// (output, maximum, sum).
struct AttentionTask {
  int64_t sequence = 0;
  int64_t group = 0;
  int64_t first_token = 0;  // of the step
  int64_t num_tokens = 0;
  int64_t first_chunk = 0;  // chunks that some row may see
  int64_t end_chunk = 0;
  // Where the states of the task's first chunk go, in rows; -1: the task sees the whole context of
  // its rows and writes their output itself.
  int64_t partial_row = -1;
};

// Rows whose context was split: num_chunks times (num_tokens * group_heads) states, in order.
struct AttentionMerge {
  int64_t group = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  int64_t partial_row = 0;
  int64_t num_chunks = 0;
};

struct AttentionPlan {
  int64_t group_heads = 0;
  std::vector<AttentionTask> tasks;
  std::vector<AttentionMerge> merges;
  int64_t num_whole_tasks = 0;  // before contexts were cut
  int64_t num_partial_rows = 0;
  int64_t max_rows = 0;  // of a task
};

// Reads the step's arrays, so it runs when the stream does. Fails on arrays that are out of range
// or out of order.
absl::StatusOr<AttentionPlan> PlanAttention(const AttentionWork& work, int num_threads);

}  // namespace heddle
