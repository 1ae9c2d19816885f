#include "runtime/shard_layout.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/model/tensor_names.h"

namespace heddle {
namespace {

// The search for a number of ranks that fits in memory ends here.
constexpr int kMostRanksTried = 256;

// Sizes of tensors and of slices of them, as stored.
class TensorSizes {
 public:
  TensorSizes(const WeightSource& weights, std::optional<DType> requested)
      : weights_(weights), requested_(requested) {}

  DType DTypeOf(absl::string_view name) const { return StoredDType(Info(name).dtype, requested_); }

  int64_t VectorBytes(absl::string_view name) const {
    return Info(name).shape[0] * static_cast<int64_t>(sizeof(float));
  }

  int64_t RowsBytes(absl::string_view name, Range rows) const {
    return MatrixBytes(name, rows, {0, Info(name).shape[1]});
  }
  // A block that the range cuts is held whole.
  int64_t ColumnsBytes(absl::string_view name, Range cols) const {
    return MatrixBytes(name, {0, Info(name).shape[0]}, cols);
  }

 private:
  const TensorInfo& Info(absl::string_view name) const {
    const TensorInfo* info = weights_.Find(name);
    CHECK(info != nullptr) << "the checkpoint was opened without " << name;
    return *info;
  }

  int64_t MatrixBytes(absl::string_view name, Range rows, Range cols) const {
    const DType dtype = DTypeOf(name);
    const int64_t block = BlockElements(dtype);
    const Range stored = CoverWithBlocks(cols, block, Info(name).shape[1]).stored;
    return rows.size() * ((stored.size() + block - 1) / block) * BlockBytes(dtype);
  }

  const WeightSource& weights_;
  const std::optional<DType> requested_;
};

int64_t AttentionBytes(const ModelSpec& spec, const TensorSizes& sizes, int64_t layer,
                       const KvGridRank& heads) {
  const Range query_rows = heads.query_heads.ScaledBy(spec.head_dim);
  const Range kv_rows = heads.kv_heads.ScaledBy(spec.head_dim);
  return sizes.RowsBytes(LayerTensor(layer, "self_attn.q_proj.weight"), query_rows) +
         sizes.RowsBytes(LayerTensor(layer, "self_attn.k_proj.weight"), kv_rows) +
         sizes.RowsBytes(LayerTensor(layer, "self_attn.v_proj.weight"), kv_rows) +
         sizes.ColumnsBytes(LayerTensor(layer, "self_attn.o_proj.weight"), query_rows);
}

int64_t FfnBytes(const TensorSizes& sizes, int64_t layer, Range columns) {
  return sizes.RowsBytes(LayerTensor(layer, "mlp.gate_proj.weight"), columns) +
         sizes.RowsBytes(LayerTensor(layer, "mlp.up_proj.weight"), columns) +
         sizes.ColumnsBytes(LayerTensor(layer, "mlp.down_proj.weight"), columns);
}

FfnShape FfnShapeOf(const ModelSpec& spec, const TensorSizes& sizes, int64_t layer) {
  const Range all = {0, spec.intermediate_size};
  return {.num_columns = all.size(),
          .block_columns = BlockElements(sizes.DTypeOf(LayerTensor(layer, "mlp.down_proj.weight"))),
          .bytes_per_column =
              static_cast<double>(FfnBytes(sizes, layer, all)) / static_cast<double>(all.size())};
}

// Norms and biases are small, and repeated rather than cut when counted.
int64_t VectorBytes(const WeightSource& weights, const TensorSizes& sizes) {
  int64_t bytes = 0;
  for (const TensorInfo& tensor : weights.tensors()) {
    if (tensor.shape.size() == 1) bytes += sizes.VectorBytes(tensor.name);
  }
  return bytes;
}

// Without regard to memory.
absl::StatusOr<ShardLayout> Deal(const ModelSpec& spec, const WeightSource& weights,
                                 const ShardLayoutOptions& options, KvGrid grid) {
  const TensorSizes sizes(weights, options.weight_dtype);
  const int64_t vector_bytes = VectorBytes(weights, sizes);
  ShardLayout layout = {.grid = std::move(grid), .ranks = {}};
  const int num_ranks = layout.grid.num_ranks();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const KvGridRank& heads = layout.grid.rank(rank);
    ASSIGN_OR_RETURN(KvLayout kv, KvLayout::ForGqa(options.page_size, options.kv_cache_dtype,
                                                   heads.kv_heads.begin, heads.kv_heads.size(),
                                                   spec.head_dim, spec.windows));
    const Range vocabulary = SplitVocabulary(spec.vocab_size, num_ranks, rank);
    int64_t bytes = vector_bytes + sizes.RowsBytes(kEmbeddingTensor, vocabulary);
    if (!spec.tie_word_embeddings) bytes += sizes.RowsBytes(kHeadTensor, vocabulary);
    layout.ranks.push_back({.heads = heads,
                            .ffn_columns = {},
                            .vocabulary = vocabulary,
                            .weight_bytes = bytes,
                            .kv = std::move(kv)});
  }
  std::vector<int64_t> attention_bytes(num_ranks);
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      attention_bytes[rank] = AttentionBytes(spec, sizes, layer, layout.ranks[rank].heads);
    }
    ASSIGN_OR_RETURN(const std::vector<Range> columns,
                     SplitFfn(FfnShapeOf(spec, sizes, layer), attention_bytes));
    for (int rank = 0; rank < num_ranks; ++rank) {
      RankLayout& held = layout.ranks[rank];
      held.ffn_columns.push_back(columns[rank]);
      held.weight_bytes += attention_bytes[rank] + FfnBytes(sizes, layer, columns[rank]);
    }
  }
  return layout;
}

// Of the rank that needs the most: weights and one page.
int64_t LeastMemory(const ShardLayout& layout) {
  int64_t bytes = 0;
  for (const RankLayout& rank : layout.ranks) {
    bytes = std::max(bytes, rank.weight_bytes + rank.kv.bytes_per_page());
  }
  return bytes;
}

// Ok, or why `layout` is above the memory of a rank, with the smallest count that is not.
absl::Status CheckMemory(const ModelSpec& spec, const WeightSource& weights,
                         const ShardLayoutOptions& options, const ShardLayout& layout) {
  const int num_ranks = layout.grid.num_ranks();
  const int num_stripes = layout.grid.num_stripes();
  if (!options.memory_bytes.has_value() || LeastMemory(layout) <= *options.memory_bytes) {
    return absl::OkStatus();
  }
  std::string advice = absl::StrCat("no count up to ", kMostRanksTried, " ranks fits");
  for (int n = num_ranks + num_stripes; n <= kMostRanksTried; n += num_stripes) {
    absl::StatusOr<KvGrid> grid =
        KvGrid::Create(spec.total_query_heads, spec.total_kv_heads, n, num_stripes);
    if (!grid.ok()) break;
    ASSIGN_OR_RETURN(const ShardLayout larger, Deal(spec, weights, options, *std::move(grid)));
    if (LeastMemory(larger) <= *options.memory_bytes) {
      advice = absl::StrCat("the smallest count that fits is ", n, " ranks, with ",
                            LeastMemory(larger), " bytes on the fullest");
      break;
    }
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("of ", num_ranks, num_ranks == 1 ? " rank" : " ranks", " the fullest needs ",
                   LeastMemory(layout), " bytes for its weights and one page, and has ",
                   *options.memory_bytes, "; ", advice));
}

}  // namespace

std::vector<Range> ShardLayout::VocabularyShards() const {
  std::vector<Range> shards;
  for (const RankLayout& rank : ranks) shards.push_back(rank.vocabulary);
  return shards;
}

int64_t ShardLayout::MaxWeightBytes() const {
  int64_t bytes = 0;
  for (const RankLayout& rank : ranks) bytes = std::max(bytes, rank.weight_bytes);
  return bytes;
}

DType StoredDType(DType in_checkpoint, std::optional<DType> requested) {
  return requested.has_value() && !IsBlockQuantised(in_checkpoint) ? *requested : in_checkpoint;
}

absl::StatusOr<ShardLayout> BuildShardLayout(const ModelSpec& spec, const WeightSource& weights,
                                             const ShardLayoutOptions& options) {
  if (spec.mla.has_value() || spec.moe.has_value() || spec.block_fp8.has_value()) {
    return absl::UnimplementedError(absl::StrCat("models with ",
                                                 spec.mla.has_value()   ? "latent attention"
                                                 : spec.moe.has_value() ? "experts"
                                                                        : "block-fp8 weights",
                                                 " (", spec.model_type,
                                                 ") cannot be dealt to ranks yet"));
  }
  std::vector<std::string> reasons;
  absl::StatusOr<KvGrid> grid = KvGrid::Create(spec.total_query_heads, spec.total_kv_heads,
                                               options.num_ranks, options.num_stripes);
  const absl::Status refusal = grid.status();
  if (!refusal.ok()) {
    reasons.emplace_back(refusal.message());
    // Memory can be judged all the same where it is the stripes that do not fit.
    grid = KvGrid::Create(spec.total_query_heads, spec.total_kv_heads, options.num_ranks);
  }
  if (options.weight_dtype.has_value() && !IsFloatingPoint(*options.weight_dtype)) {
    reasons.push_back(absl::StrCat("weights can be kept as float32, bfloat16 or float16, not ",
                                   DTypeName(*options.weight_dtype)));
  } else if (grid.ok()) {
    ASSIGN_OR_RETURN(ShardLayout layout, Deal(spec, weights, options, *std::move(grid)));
    const absl::Status memory = CheckMemory(spec, weights, options, layout);
    if (reasons.empty() && memory.ok()) return layout;
    if (reasons.empty()) return memory;
    if (!memory.ok()) reasons.emplace_back(memory.message());
  }
  return absl::InvalidArgumentError(absl::StrJoin(reasons, "; "));
}

}  // namespace heddle
