// Puts the pieces of the engine's outputs together, by request.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/engine.h"
#include "runtime/request.h"

namespace heddle {

// A sequence from its first to its last piece.
struct CollectedSequence {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> token_ids;
  std::string text;
  std::vector<PositionLogprobs> logprobs;
  std::vector<float> prompt_logprobs;
  std::vector<float> prompt_logits;
  FinishReason finish_reason = FinishReason::kUnfinished;
  absl::Status error;
  int64_t cached_tokens = 0;
  std::vector<double> token_seconds;  // when each token came, on the steady clock
};

// Takes outputs on the engine's thread and hands a request over when its last sequence has ended.
// Thread-safe.
class Collector {
 public:
  using OnFinished = std::function<void(size_t place, std::vector<CollectedSequence> sequences)>;
  explicit Collector(OnFinished on_finished) : on_finished_(std::move(on_finished)) {}

  // Submits the request that stands at `place` of the input under that number as its id, or says
  // why it cannot run; it is then never finished.
  absl::Status Submit(Engine& engine, size_t place, const absl::StatusOr<Request>& request);
  void Take(RequestOutput output);

 private:
  struct Pending {
    std::vector<CollectedSequence> sequences;
    size_t num_finished = 0;
  };

  const OnFinished on_finished_;
  std::mutex mutex_;
  std::unordered_map<std::string, Pending> pending_;
};

}  // namespace heddle
