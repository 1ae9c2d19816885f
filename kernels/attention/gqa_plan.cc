#include "kernels/attention/gqa_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

// Rows that share one pass over K and V: enough to compute while data is near, few enough for
// their states to stay in the second-level cache.
constexpr int64_t kMaxRows = 64;
// Tasks a thread, so that the last ones to finish wait little for each other.
constexpr int64_t kTasksPerThread = 6;

absl::Status CheckSequence(const GqaAttentionArgs& args, int64_t sequence) {
  const auto error = [&](auto... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("gqa_attention: sequence ", sequence, ": ", what...));
  };
  const int64_t begin = args.query_starts[sequence], end = args.query_starts[sequence + 1];
  if (begin < 0 || begin > end || end > args.q.rows) {
    return error("tokens ", begin, " to ", end, " of ", args.q.rows);
  }
  const int64_t first_page = args.kv.page_starts[sequence];
  const int64_t end_page = args.kv.page_starts[sequence + 1];
  if (first_page < 0 || first_page > end_page) return error("pages ", first_page, " to ", end_page);
  int64_t position = 0;
  for (int64_t i = first_page; i < end_page; ++i) {
    const PageSpan& page = args.kv.pages[i];
    if (page.slot < 0 || page.num_valid < 0 || page.num_valid > args.kv.page_size) {
      return error("page ", i - first_page, " in slot ", page.slot, " holds ", page.num_valid,
                   " of ", args.kv.page_size, " tokens");
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

StoredRange StoredPositions(const PagedKvView& kv, int64_t sequence) {
  const PageSpan* begin = kv.pages + kv.page_starts[sequence];
  const PageSpan* end = kv.pages + kv.page_starts[sequence + 1];
  while (begin < end && begin->num_valid == 0) ++begin;
  while (begin < end && end[-1].num_valid == 0) --end;
  if (begin == end) return {};
  return {begin->first_position, int64_t{end[-1].first_position} + end[-1].num_valid - 1};
}

// One task a block of tokens and KV head, over the whole context.
void AddSequence(const GqaAttentionArgs& args, int64_t sequence, std::vector<GqaTask>& tasks) {
  const int64_t group = args.num_query_heads / args.kv.num_kv_heads;
  const int64_t block = std::max<int64_t>(1, kMaxRows / group);
  const StoredRange stored = StoredPositions(args.kv, sequence);
  const int64_t end = args.query_starts[sequence + 1];
  for (int64_t token = args.query_starts[sequence]; token < end; token += block) {
    const int64_t num_tokens = std::min(block, end - token);
    const auto [lowest, highest] =
        std::minmax_element(args.positions + token, args.positions + token + num_tokens);
    const int64_t first =
        args.window > 0 ? std::max(stored.first, *lowest - args.window + 1) : stored.first;
    const int64_t last = std::min<int64_t>(stored.last, *highest);
    GqaTask task{.sequence = sequence, .first_token = token, .num_tokens = num_tokens};
    if (first <= last) {
      task.first_chunk = first / kAttentionChunk;
      task.end_chunk = last / kAttentionChunk + 1;
    }
    for (int64_t head = 0; head < args.kv.num_kv_heads; ++head) {
      task.kv_head = head;
      tasks.push_back(task);
    }
  }
}

}  // namespace

absl::StatusOr<GqaPlan> PlanGqa(const GqaAttentionArgs& args, int num_threads) {
  const int64_t group = args.num_query_heads / args.kv.num_kv_heads;
  std::vector<GqaTask> whole;
  for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) {
    RETURN_IF_ERROR(CheckSequence(args, sequence));
    AddSequence(args, sequence, whole);
  }

  int64_t total_chunks = 0;
  for (const GqaTask& task : whole) total_chunks += task.end_chunk - task.first_chunk;
  const int64_t max_chunks =
      num_threads == 1 ? total_chunks : total_chunks / (num_threads * kTasksPerThread) + 1;

  GqaPlan plan;
  plan.tasks.reserve(whole.size());
  for (const GqaTask& task : whole) {
    const int64_t rows = task.num_tokens * group;
    const int64_t num_chunks = task.end_chunk - task.first_chunk;
    plan.max_rows = std::max(plan.max_rows, rows);
    if (num_chunks <= max_chunks) {
      plan.tasks.push_back(task);
      continue;
    }
    plan.merges.push_back({.kv_head = task.kv_head,
                           .first_token = task.first_token,
                           .num_tokens = task.num_tokens,
                           .partial_row = plan.num_partial_rows,
                           .num_chunks = num_chunks});
    for (int64_t done = 0; done < num_chunks; done += max_chunks) {
      GqaTask part = task;
      part.first_chunk = task.first_chunk + done;
      part.end_chunk = std::min(task.end_chunk, part.first_chunk + max_chunks);
      part.partial_row = plan.num_partial_rows + done * rows;
      plan.tasks.push_back(part);
    }
    plan.num_partial_rows += num_chunks * rows;
  }
  return plan;
}

}  // namespace heddle
