// What --decode-context-parallel-size auto stands for.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/cost_model.h"
#include "runtime/device_table.h"
#include "runtime/model/model_spec.h"
#include "runtime/shard_layout.h"

namespace heddle {

// What a job is started for.
struct ExpectedLoad {
  int64_t max_num_seqs = 0;
  int64_t context_len = 0;  // tokens cached of each of them, on average
};

// A number of stripes that can run, and what the caches of all ranks then hold.
struct StripeOption {
  int num_stripes = 1;
  int64_t capacity_tokens = 0;
};

// One for each number of stripes that can run on `layout.num_ranks` ranks of `memory_bytes` each;
// num_stripes and memory_bytes of `layout` are not read.
absl::StatusOr<std::vector<StripeOption>> StripeOptionsOf(const ModelSpec& spec,
                                                          const WeightSource& weights,
                                                          ShardLayoutOptions layout,
                                                          double memory_bytes);

struct StripeChoice {
  int num_stripes = 1;
  std::string why;  // one line with the figures it was chosen by
};

// Pure. Of the options that hold the whole load, the one whose decode step is predicted to be the
// fastest; if none does, the one that holds the most. Ties go to fewer stripes. `options`: at least
// one, ascending; each divides `num_ranks`.
StripeChoice ChooseStripes(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                           std::span<const StripeOption> options, const ExpectedLoad& load);

}  // namespace heddle
