#include "launch/commands/collector.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

constexpr int64_t kMaxSequences = 1 << 16;  // above what any engine admits for one request

template <typename T>
void MoveToEnd(std::vector<T> from, std::vector<T>& to) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace

absl::Status Collector::Submit(Engine& engine, size_t place,
                               const absl::StatusOr<Request>& request) {
  RETURN_IF_ERROR(request.status());
  Request submitted = *request;
  submitted.id = std::to_string(place);
  const std::string id = submitted.id;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A nonsensical n is refused below.
    pending_[id].sequences.resize(std::clamp<int64_t>(submitted.params.n, 1, kMaxSequences));
  }
  absl::Status status = engine.Submit(std::move(submitted));
  if (!status.ok()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pending_.erase(id);
  }
  return status;
}

void Collector::Take(RequestOutput output) {
  const double now =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  std::vector<CollectedSequence> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pending_.find(output.id);
    if (found == pending_.end()) return;
    Pending& pending = found->second;
    CollectedSequence& sequence = pending.sequences[output.index];
    if (!output.prompt_token_ids.empty()) {
      sequence.prompt_token_ids = std::move(output.prompt_token_ids);
      sequence.cached_tokens = output.cached_tokens;
      sequence.prompt_logprobs = std::move(output.prompt_logprobs);
      sequence.prompt_logits = std::move(output.prompt_logits);
    }
    sequence.token_seconds.insert(sequence.token_seconds.end(), output.token_ids.size(), now);
    MoveToEnd(std::move(output.token_ids), sequence.token_ids);
    MoveToEnd(std::move(output.logprobs), sequence.logprobs);
    sequence.text += output.text;
    if (output.finish_reason == FinishReason::kUnfinished) return;
    sequence.finish_reason = output.finish_reason;
    sequence.error = std::move(output.error);
    if (++pending.num_finished < pending.sequences.size()) return;
    finished = std::move(pending.sequences);
    pending_.erase(found);
  }
  on_finished_(static_cast<size_t>(std::stoull(output.id)), std::move(finished));
}

}  // namespace heddle
