#include "kernels/attention/attention_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

// Parts a thread into which long contexts are cut, so that the last ones to finish wait little for
// each other.
constexpr int64_t kTasksPerThread = 6;

absl::Status CheckSequence(const AttentionWork& work, int64_t sequence) {
  const auto error = [&](auto... what) {
    return absl::InvalidArgumentError(
        absl::StrCat(work.op, ": sequence ", sequence, ": ", what...));
  };
  const int64_t begin = work.query_starts[sequence], end = work.query_starts[sequence + 1];
  if (begin < 0 || begin > end || end > work.num_tokens) {
    return error("tokens ", begin, " to ", end, " of ", work.num_tokens);
  }
  const int64_t first_page = work.page_starts[sequence];
  const int64_t end_page = work.page_starts[sequence + 1];
  if (first_page < 0 || first_page > end_page) return error("pages ", first_page, " to ", end_page);
  int64_t position = 0;
  for (int64_t i = first_page; i < end_page; ++i) {
    const PageSpan& page = work.pages[i];
    if (page.slot < 0 || page.num_valid < 0 || page.num_valid > work.page_size) {
      return error("page ", i - first_page, " in slot ", page.slot, " holds ", page.num_valid,
                   " of ", work.page_size, " tokens");
    }
    if (page.first_position < position) {
      return error("page ", i - first_page, " begins at position ", page.first_position,
                   ", before ", position);
    }
    position = int64_t{page.first_position} + page.num_valid;
  }
  return absl::OkStatus();
}

// First and last position stored; first > last if there is none.
struct StoredRange {
  int64_t first = 0;
  int64_t last = -1;
};

StoredRange StoredPositions(const AttentionWork& work, int64_t sequence) {
  const PageSpan* begin = work.pages + work.page_starts[sequence];
  const PageSpan* end = work.pages + work.page_starts[sequence + 1];
  while (begin < end && begin->num_valid == 0) ++begin;
  while (begin < end && end[-1].num_valid == 0) --end;
  if (begin == end) return {};
  return {begin->first_position, int64_t{end[-1].first_position} + end[-1].num_valid - 1};
}

// One task a block of tokens and group of heads, over the whole context.
void AddSequence(const AttentionWork& work, int64_t sequence, std::vector<AttentionTask>& tasks) {
  const int64_t block = std::max<int64_t>(1, work.max_rows / work.group_heads);
  const StoredRange stored = StoredPositions(work, sequence);
  const int64_t end = work.query_starts[sequence + 1];
  for (int64_t token = work.query_starts[sequence]; token < end; token += block) {
    const int64_t num_tokens = std::min(block, end - token);
    const auto [lowest, highest] =
        std::minmax_element(work.positions + token, work.positions + token + num_tokens);
    const int64_t first =
        work.window > 0 ? std::max(stored.first, *lowest - work.window + 1) : stored.first;
    const int64_t last = std::min<int64_t>(stored.last, *highest);
    AttentionTask task{.sequence = sequence, .first_token = token, .num_tokens = num_tokens};
    if (first <= last) {
      task.first_chunk = first / work.chunk;
      task.end_chunk = last / work.chunk + 1;
    }
    for (int64_t group = 0; group < work.num_groups; ++group) {
      task.group = group;
      tasks.push_back(task);
    }
  }
}

}  // namespace

absl::StatusOr<AttentionPlan> PlanAttention(const AttentionWork& work, int num_threads) {
  std::vector<AttentionTask> whole;
  for (int64_t sequence = 0; sequence < work.num_sequences; ++sequence) {
    RETURN_IF_ERROR(CheckSequence(work, sequence));
    AddSequence(work, sequence, whole);
  }

  int64_t total_chunks = 0;
  for (const AttentionTask& task : whole) total_chunks += task.end_chunk - task.first_chunk;
  const int64_t max_whole =
      num_threads == 1 ? total_chunks : total_chunks / (num_threads * work.tasks_before_splits) + 1;
  const int64_t max_part = total_chunks / (num_threads * kTasksPerThread) + 1;

  AttentionPlan plan;
  plan.group_heads = work.group_heads;
  plan.num_whole_tasks = static_cast<int64_t>(whole.size());
  plan.tasks.reserve(whole.size());
  for (const AttentionTask& task : whole) {
    const int64_t rows = task.num_tokens * work.group_heads;
    const int64_t num_chunks = task.end_chunk - task.first_chunk;
    plan.max_rows = std::max(plan.max_rows, rows);
    if (num_chunks <= max_whole) {
      plan.tasks.push_back(task);
      continue;
    }
    plan.merges.push_back({.group = task.group,
                           .first_token = task.first_token,
                           .num_tokens = task.num_tokens,
                           .partial_row = plan.num_partial_rows,
                           .num_chunks = num_chunks});
    for (int64_t done = 0; done < num_chunks; done += max_part) {
      AttentionTask part = task;
      part.first_chunk = task.first_chunk + done;
      part.end_chunk = std::min(task.end_chunk, part.first_chunk + max_part);
      part.partial_row = plan.num_partial_rows + done * rows;
      plan.tasks.push_back(part);
    }
    plan.num_partial_rows += num_chunks * rows;
  }
  return plan;
}

}  // namespace heddle
