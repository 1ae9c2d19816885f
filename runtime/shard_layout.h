// How every rank would hold a model: where heads meet pages. Nothing else turns a model's shape and
// a number of ranks into what a rank owns; workers and `inspect` both ask here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/kv_layout.h"
#include "kernels/base/dtype.h"
#include "parallel/kv_grid.h"
#include "parallel/shard_spec.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"

namespace heddle {

struct ShardLayoutOptions {
  int num_ranks = 1;
  int num_stripes = 1;
  // Each rank attends for whole sequences of its own, with all heads, instead of all ranks for all
  // sequences with some heads each. Only for MLA, and with one stripe here.
  bool dp_attention = false;
  // Of plain weights. Unset: as in the checkpoint.
  std::optional<DType> weight_dtype = std::nullopt;
  DType kv_cache_dtype = DType::kFloat32;  // float32, bfloat16 or float16
  int64_t page_size = 16;
  // Whole routed experts are dealt over the ranks, rather than columns of each.
  bool expert_parallel = false;
  // With both of the above: tokens travel to their experts alone, and so the shared experts are
  // whole on every rank.
  bool exchange_experts = false;
  // Of one rank, for its weights and one page. Unset: not checked.
  std::optional<int64_t> memory_bytes = std::nullopt;
};

// Whether the tokens of such a job could travel: data-parallel attention and whole experts dealt
// over more than one rank. Nothing of BuildShardLayout's is checked, nor is exchange_experts read.
bool CanExchangeExperts(const ModelSpec& spec, const ShardLayoutOptions& options);

// What one rank holds of a layer's FFN. All ranges are global indexes and may be empty.
struct FfnShare {
  Range columns = {};         // of the dense FFN, or of each routed expert held
  Range experts = {};         // routed experts; none in a dense layer
  Range shared_columns = {};  // of the shared experts together
};

// What one rank holds.
struct RankLayout {
  KvGridRank heads;
  std::vector<FfnShare> ffn;  // [num_layers]
  Range vocabulary;           // rows of the embedding and of the head
  // In their stored type: matrices, and the vectors that every rank repeats. A tied table counts
  // once.
  int64_t weight_bytes = 0;
  KvLayout kv;  // its pages' planes, in bytes; none without KV heads
};

// Immutable.
struct ShardLayout {
  KvGrid grid;
  bool exchanges_experts = false;
  std::vector<RankLayout> ranks;

  std::vector<Range> VocabularyShards() const;
  int64_t MaxWeightBytes() const;  // of the fullest rank
};

// Tokens a page where nothing is asked for: few empty slots, or for MLA, whose latents are small,
// few pages.
int64_t DefaultPageSize(const ModelSpec& spec);

// Reads shapes and dtypes alone. InvalidArgument for what cannot run, ResourceExhausted for a share
// above `memory_bytes`; the message lists every reason, with the counts that would work.
absl::StatusOr<ShardLayout> BuildShardLayout(const ModelSpec& spec, const WeightSource& weights,
                                             const ShardLayoutOptions& options);

// The type in which a tensor of the checkpoint is kept: quantised ones never change.
DType StoredDType(DType in_checkpoint, std::optional<DType> requested);

}  // namespace heddle
