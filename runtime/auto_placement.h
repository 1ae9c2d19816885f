// What a job chooses when it starts, by what its own ranks and links are measured to do: the
// stripes of --decode-context-parallel-size auto, and how tokens meet their experts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "parallel/kv_grid.h"
#include "parallel/world.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/device_table.h"
#include "runtime/engine_config.h"
#include "runtime/model/model_spec.h"
#include "runtime/shard_layout.h"
#include "runtime/stripe_choice.h"
#include "runtime/worker.h"

namespace heddle {

// Pages of `rank`'s cache that it could have beside its weights in `free_memory` bytes, by the
// flags of `config` (ChooseNumPages). A stripe needs room for its part of the longest sequence, or
// for all of it where sequences lie on one stripe each.
absl::StatusOr<int64_t> NumPagesOf(const EngineConfig& config, const EngineLimits& limits,
                                   const RankLayout& rank, const KvGrid& grid, int64_t free_memory);

// Collective: what a CPU rank can do while all others are as busy, the slowest of them, and how
// fast they sum, if there are others. Takes about 0.2 s and up to 128 MiB a node. The same on all
// ranks.
absl::StatusOr<DeviceFigures> MeasureRanks(World& world, Backend& backend, Stream& stream);

// Collective: fills in the exchange of every option of more than one stripe. Of more than six the
// smaller groups are taken to be as slow as the smallest that was measured. `options`: ascending.
absl::Status MeasureExchanges(std::span<StripeOption> options, World& world, Backend& backend,
                              Stream& stream);

// "a rank reads 5 GB/s ...": what was measured, in a line.
std::string FiguresText(const DeviceFigures& device, std::span<const StripeOption> options);

// Collective: the number of stripes for the load that `config` expects, the same on all ranks, and
// logs why on rank 0. One, without measuring anything, if there is but one rank or no cache.
// `layout` says how the ranks hold the model; its stripes are not read. `limits` are those of the
// worker, without stripes and pages. A config that no number of stripes can run gives one, for the
// caller to refuse.
absl::StatusOr<int> ChooseStripesOfJob(const EngineConfig& config, const EngineLimits& limits,
                                       const ModelSpec& spec, const WeightSource& weights,
                                       const ShardLayoutOptions& layout, int num_threads,
                                       World& world);

// Collective: whether tokens travel to their experts alone, as ExchangesExperts (cost_model.h) says
// of max_num_seqs sequences, the same on all ranks, and logs why on rank 0. Measures nothing if
// that cannot be or `config` says which. `layout`: whether they travel and its stripes are not
// read.
absl::StatusOr<bool> ChooseExchangeOfJob(const EngineConfig& config, const EngineLimits& limits,
                                         const ModelSpec& spec, const WeightSource& weights,
                                         const ShardLayoutOptions& layout, int num_threads,
                                         World& world);

}  // namespace heddle
