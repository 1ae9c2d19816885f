// What --decode-context-parallel-size auto stands for.
#pragma once

#include <cstdint>
#include <optional>
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

// The context to expect: what --expected-context-len says, or if it says nothing (0) half of the
// longest. InvalidArgument above kLongestContext.
absl::StatusOr<int64_t> ExpectedContext(int64_t expected_context_len, int64_t max_model_len);

// A number of stripes that can run, and what the caches of all ranks then hold.
struct StripeOption {
  int num_stripes = 1;
  int64_t capacity_tokens = 0;
  // Within its stripe groups, where that was measured; else as the device has it.
  std::optional<CollectiveSpeed> exchange = std::nullopt;
};

// One for each number of stripes that can run on `layout.num_ranks` ranks of `memory_bytes` each;
// num_stripes and memory_bytes of `layout` are not read.
absl::StatusOr<std::vector<StripeOption>> StripeOptionsOf(const ModelSpec& spec,
                                                          const WeightSource& weights,
                                                          ShardLayoutOptions layout,
                                                          double memory_bytes);

// What counts as equal: pages are whole, and weights of a rank differ a little.
inline constexpr double kSameCapacity = 0.95;  // of the most tokens
inline constexpr double kSameTime = 1.005;     // of the least time

struct StripeChoice {
  int num_stripes = 1;
  std::string why;  // one line with the figures it was chosen by
};

// Of one decode step of the load.
StepTime PredictOption(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                       const StripeOption& option, const ExpectedLoad& load);

// Pure. Of the options that hold the whole load, the one whose decode step is predicted to be the
// fastest; if none does, the fastest of those that hold the most (kSameCapacity). Ties (kSameTime)
// go to fewer stripes. `options`: at least one, ascending; each divides `num_ranks`.
StripeChoice ChooseStripes(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                           std::span<const StripeOption> options, const ExpectedLoad& load);

}  // namespace heddle
