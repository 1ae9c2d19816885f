// A whole engine over ranks that are threads of the test.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "launch/commands/collector.h"
#include "runtime/engine.h"

namespace heddle {

// A small model's config: short context, one thread a rank, float32 products, checks after every
// step.
EngineConfig TestEngineConfig(const std::string& model);

// Starts an engine over `num_ranks` ranks, runs `body` on rank 0 with it, and stops it. The first
// error of rank 0 or, if it had none, of another rank.
absl::Status WithEngine(const EngineConfig& config, int num_ranks, OutputCallback on_output,
                        const std::function<absl::Status(Engine& engine)>& body);

struct EngineRun {
  std::vector<std::vector<CollectedSequence>> results;  // [request][index]
  EngineStats stats;
};

// Submits all requests at once (their ids become their places) and waits for the last. Any that is
// refused is an error.
absl::StatusOr<EngineRun> RunRequests(const EngineConfig& config, int num_ranks,
                                      const std::vector<Request>& requests);

// Greedy, to `max_tokens` whatever they are.
Request GreedyRequest(std::vector<int32_t> prompt, int64_t max_tokens);

}  // namespace heddle
