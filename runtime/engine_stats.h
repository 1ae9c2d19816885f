// Counters of one engine since it started or since they were reset.
#pragma once

#include <cstdint>

namespace heddle {

struct EngineStats {
  int64_t num_steps = 0;
  int64_t num_prompt_tokens = 0;    // of admitted requests, cached ones included
  int64_t num_cached_tokens = 0;    // of those, found in the prefix cache
  int64_t num_computed_tokens = 0;  // rows through the model, recomputation included
  int64_t num_generated_tokens = 0;
  int64_t num_finished_sequences = 0;
  int64_t num_failed_sequences = 0;  // ended with "error"
  int64_t num_preemptions = 0;
  int64_t num_running = 0;              // now
  int64_t num_waiting = 0;              // now
  int64_t num_scheduled_sequences = 0;  // summed over the steps: / num_steps is the mean batch
  double step_seconds = 0;              // inside steps
  double kv_waste = 0;         // empty share of the pages that hold a token, mean over the steps
  double kv_usage_peak = 0;    // most live pages / all pages
  int64_t total_kv_pages = 0;  // per rank
  int64_t num_stripes = 1;     // of the cache
  int64_t kv_bytes_per_token = 0;  // of rank 0
  int64_t weight_bytes = 0;        // of rank 0
  int64_t kv_tokens_read = 0;      // stored tokens that decode rows attended to, summed
};

}  // namespace heddle
