// Executes step plans on one rank's shard. No policy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/page_pool.h"
#include "parallel/world.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/engine_config.h"
#include "runtime/sampling/sampler.h"
#include "runtime/shard_layout.h"
#include "runtime/step_plan.h"

namespace heddle {

// What one step gave; `samples` are equal on every rank, scores are on rank 0 alone.
struct StepResult {
  // Of each plan row that samples, in the plan's order.
  std::vector<SampledToken> samples;

  // Of each plan row whose slot scores its prompt, in the plan's order.
  struct PromptScore {
    int32_t row = 0;  // in the plan
    // Of the token after each position of the row that has a known successor.
    std::vector<float> logprobs;
    std::vector<float> logits;  // [query_length, vocab_size], if asked for
  };
  std::vector<PromptScore> prompt_scores;
};

// Sizes that all ranks agreed on, with the zeros of EngineConfig filled in.
struct EngineLimits {
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 0;
  int64_t max_num_batched_tokens = 0;
  int64_t page_size = 0;
  int64_t num_stripes = 1;       // with data-parallel attention one a rank
  int64_t num_pages = 0;         // per rank; 0 without a cache
  int64_t retention_window = 0;  // positions after which no layer sees a token; 0: never
};

// Owns everything a rank has of the model: device, weights, page pool, the mirror of rank 0's page
// tables, and one slot a row of the persistent batch. Lives and is called on one thread.
class Worker {
 public:
  // Collective: loads this rank's shard and agrees on the number of pages. `world` outlives the
  // worker. Bad input is refused before a weight is read.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(const EngineConfig& config,
                                                        Checkpoint& checkpoint,
                                                        int64_t num_sampled_ids, World& world);
  virtual ~Worker() = default;

  // Collective. An error is fatal for the job: of a device, of a peer, or of a plan that does not
  // follow the one before.
  virtual absl::StatusOr<StepResult> Execute(const StepPlan& plan) = 0;

  virtual const EngineLimits& limits() const = 0;
  virtual const RankLayout& layout() const = 0;
  // This rank's pages, null without a cache: for tests that look at the bytes.
  virtual PagePool* page_pool() = 0;
};

}  // namespace heddle
