// How every rank would hold a model: where heads meet pages. Nothing else turns a model's shape and
// a number of ranks into what a rank owns; workers and `inspect` both ask here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "parallel/kv_grid.h"
#include "parallel/shard_spec.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"

namespace heddle {

struct ShardLayoutOptions {
  int num_ranks = 1;
  int num_stripes = 1;
  std::optional<DType> weight_dtype;       // of plain weights; unset: as in the checkpoint
  DType kv_cache_dtype = DType::kFloat32;  // float32, bfloat16 or float16
  int64_t page_size = 16;
  // Of one rank, for weights and at least one page. Unset: not checked.
  std::optional<int64_t> memory_bytes;
};

// What one rank holds. All ranges are global indexes and may be empty.
struct RankLayout {
  KvGridRank heads;
  std::vector<Range> ffn_columns;  // [num_layers]
  Range vocabulary;                // rows of the embedding and of the head
  // Weights in their stored type: matrices, and the vectors that every rank repeats. A tied table
  // is counted once.
  int64_t weight_bytes = 0;
  // Of one token of a page that this rank stores, over all layers; 0 without KV heads.
  int64_t kv_bytes_per_token = 0;
};

// Immutable.
struct ShardLayout {
  KvGrid grid;
  std::vector<RankLayout> ranks;

  std::vector<Range> VocabularyShards() const;
  int64_t max_weight_bytes() const;  // of the fullest rank
};

// Reads shapes and dtypes alone. InvalidArgument for what cannot run, ResourceExhausted for a share
// above `memory_bytes`; the message lists every reason, with the counts that would work.
absl::StatusOr<ShardLayout> BuildShardLayout(const ModelSpec& spec, const WeightSource& weights,
                                             const ShardLayoutOptions& options);

}  // namespace heddle
