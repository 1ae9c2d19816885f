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
  TensorSizes(const ModelSpec& spec, const WeightSource& weights, std::optional<DType> requested)
      : weights_(weights),
        requested_(requested),
        fp8_block_columns_(spec.block_fp8 ? spec.block_fp8->block_columns : 0) {}

  DType DTypeOf(absl::string_view name) const { return StoredDType(Info(name).dtype, requested_); }

  int64_t VectorBytes(absl::string_view name) const {
    return Info(name).shape[0] * static_cast<int64_t>(sizeof(float));
  }

  int64_t Bytes(absl::string_view name) const { return RowsBytes(name, AllRows(name)); }
  // Of a matrix that is kept as the checkpoint has it, whatever is requested.
  int64_t FileBytes(absl::string_view name) const {
    return MatrixBytes(Info(name).dtype, AllRows(name), AllColumns(name), AllColumns(name).end);
  }
  int64_t RowsBytes(absl::string_view name, Range rows) const {
    return MatrixBytes(DTypeOf(name), rows, AllColumns(name), AllColumns(name).end);
  }
  // A block of GGUF that the range cuts is held whole.
  int64_t ColumnsBytes(absl::string_view name, Range cols) const {
    return MatrixBytes(DTypeOf(name), AllRows(name), cols, AllColumns(name).end);
  }

  // Columns that share scales.
  int64_t BlockColumns(absl::string_view name) const { return BlockColumnsOf(DTypeOf(name)); }

 private:
  const TensorInfo& Info(absl::string_view name) const {
    const TensorInfo* info = weights_.Find(name);
    CHECK(info != nullptr) << "the checkpoint was opened without " << name;
    return *info;
  }

  Range AllRows(absl::string_view name) const { return {0, Info(name).shape[0]}; }
  Range AllColumns(absl::string_view name) const { return {0, Info(name).shape[1]}; }

  int64_t BlockColumnsOf(DType dtype) const {
    const bool scales_apart = dtype == DType::kFloat8E4M3 && fp8_block_columns_ > 0;
    return scales_apart ? fp8_block_columns_ : BlockElements(dtype);
  }

  int64_t MatrixBytes(DType dtype, Range rows, Range cols, int64_t total_cols) const {
    const int64_t block = BlockColumnsOf(dtype);
    const Range stored = CoverWithBlocks(cols, block, total_cols).stored;
    const int64_t blocks = (stored.size() + block - 1) / block;
    // Each row holds the scales of its blocks.
    if (dtype == DType::kFloat8E4M3 && fp8_block_columns_ > 0) {
      return rows.size() * (cols.size() + blocks * static_cast<int64_t>(sizeof(float)));
    }
    return rows.size() * blocks * BlockBytes(dtype);
  }

  const WeightSource& weights_;
  const std::optional<DType> requested_;
  const int64_t fp8_block_columns_;  // 0: scales are not counted
};

absl::StatusOr<KvGrid> GridOf(const ModelSpec& spec, const ShardLayoutOptions& options,
                              int num_ranks, int num_stripes) {
  if (options.dp_attention) {
    return KvGrid::CreateDataParallel(spec.total_query_heads, spec.total_kv_heads, num_ranks);
  }
  return KvGrid::Create(spec.total_query_heads, spec.total_kv_heads, num_ranks, num_stripes);
}

// What keeps attention from being data-parallel; nothing if it is not to be.
std::vector<std::string> ReasonsAgainstDpAttention(const ModelSpec& spec,
                                                   const ShardLayoutOptions& options) {
  std::vector<std::string> reasons;
  if (!options.dp_attention) return reasons;
  if (!spec.mla.has_value()) {
    reasons.push_back(absl::StrCat(
        "--enable-dp-attention: a ", spec.model_type,
        " model has no latents, which all heads share; leave the flag out and its heads are dealt "
        "over the ranks, or stripe its cache with --decode-context-parallel-size"));
  }
  if (options.num_stripes != 1) {
    reasons.push_back(absl::StrCat(
        "--decode-context-parallel-size ", options.num_stripes,
        ": --enable-dp-attention keeps each sequence whole on one rank; it must be auto or 1"));
  }
  return reasons;
}

int64_t GqaBytes(const ModelSpec& spec, const TensorSizes& sizes, int64_t layer,
                 const KvGridRank& heads) {
  const Range query_rows = heads.query_heads.ScaledBy(spec.head_dim);
  const Range kv_rows = heads.kv_heads.ScaledBy(spec.head_dim);
  return sizes.RowsBytes(LayerTensor(layer, "self_attn.q_proj.weight"), query_rows) +
         sizes.RowsBytes(LayerTensor(layer, "self_attn.k_proj.weight"), kv_rows) +
         sizes.RowsBytes(LayerTensor(layer, "self_attn.v_proj.weight"), kv_rows) +
         sizes.ColumnsBytes(LayerTensor(layer, "self_attn.o_proj.weight"), query_rows);
}

// The projections to the latents are on every rank, and kv_b is held twice (see MlaWeights).
int64_t MlaBytes(const ModelSpec& spec, const MlaSpec& mla, const TensorSizes& sizes, int64_t layer,
                 Range heads) {
  const Range query_rows = heads.ScaledBy(spec.head_dim);
  const std::string kv_b = LayerTensor(layer, "self_attn.kv_b_proj.weight");
  int64_t bytes = sizes.Bytes(LayerTensor(layer, "self_attn.kv_a_proj_with_mqa.weight")) +
                  sizes.RowsBytes(kv_b, heads.ScaledBy(mla.qk_nope_head_dim + mla.v_head_dim)) +
                  sizes.RowsBytes(kv_b, heads.ScaledBy(mla.v_head_dim)) +
                  sizes.ColumnsBytes(LayerTensor(layer, "self_attn.o_proj.weight"),
                                     heads.ScaledBy(mla.v_head_dim));
  // Transposed, so widened if it is quantised.
  const DType kv_b_type = sizes.DTypeOf(kv_b);
  bytes += heads.size() * mla.qk_nope_head_dim * mla.kv_lora_rank *
           BlockBytes(IsQuantised(kv_b_type) ? DType::kFloat32 : kv_b_type);
  if (mla.q_lora_rank == 0) {
    return bytes + sizes.RowsBytes(LayerTensor(layer, "self_attn.q_proj.weight"), query_rows);
  }
  return bytes + sizes.Bytes(LayerTensor(layer, "self_attn.q_a_proj.weight")) +
         sizes.RowsBytes(LayerTensor(layer, "self_attn.q_b_proj.weight"), query_rows);
}

int64_t AttentionBytes(const ModelSpec& spec, const TensorSizes& sizes, int64_t layer,
                       const KvGridRank& heads) {
  if (spec.mla.has_value()) return MlaBytes(spec, *spec.mla, sizes, layer, heads.query_heads);
  return GqaBytes(spec, sizes, layer, heads);
}

// The three matrices of a gated FFN.
struct FfnTensors {
  std::string gate, up, down;

  int64_t Bytes(const TensorSizes& sizes, Range columns) const {
    return sizes.RowsBytes(gate, columns) + sizes.RowsBytes(up, columns) +
           sizes.ColumnsBytes(down, columns);
  }
};

// `copies` of it are cut at the same columns.
FfnShape FfnShapeOf(const TensorSizes& sizes, const FfnTensors& tensors, int64_t width,
                    int64_t copies = 1) {
  return {.num_columns = width,
          .block_columns = sizes.BlockColumns(tensors.down),
          .may_cut_blocks = sizes.DTypeOf(tensors.down) == DType::kFloat8E4M3,
          .bytes_per_column = static_cast<double>(copies * tensors.Bytes(sizes, {0, width})) /
                              static_cast<double>(width)};
}

// Deals the FFN of one layer. `bytes` holds what each rank has of the layer's attention, and then
// of the FFN too.
absl::StatusOr<std::vector<FfnShare>> DealDenseFfn(const ModelSpec& spec, const TensorSizes& sizes,
                                                   int64_t layer, std::vector<int64_t>& bytes) {
  const FfnTensors tensors = {LayerTensor(layer, "mlp.gate_proj.weight"),
                              LayerTensor(layer, "mlp.up_proj.weight"),
                              LayerTensor(layer, "mlp.down_proj.weight")};
  ASSIGN_OR_RETURN(const std::vector<Range> columns,
                   SplitFfn(FfnShapeOf(sizes, tensors, spec.intermediate_size), bytes));
  std::vector<FfnShare> shares(bytes.size());
  for (size_t rank = 0; rank < shares.size(); ++rank) {
    shares[rank].columns = columns[rank];
    bytes[rank] += tensors.Bytes(sizes, columns[rank]);
  }
  return shares;
}

// The same for a mixture of experts. The router is on every rank. Columns of the shared experts
// make up for ranks that hold more of the rest.
absl::StatusOr<std::vector<FfnShare>> DealMoeFfn(const ModelSpec& spec, const TensorSizes& sizes,
                                                 int64_t layer, const ShardLayoutOptions& options,
                                                 std::vector<int64_t>& bytes) {
  const MoeSpec& moe = *spec.moe;
  const int num_ranks = static_cast<int>(bytes.size());
  // All experts of a layer are of one type: the loader sees to it.
  const FfnTensors expert = {ExpertTensor(spec, layer, 0, FfnMatrix::kGate),
                             ExpertTensor(spec, layer, 0, FfnMatrix::kUp),
                             ExpertTensor(spec, layer, 0, FfnMatrix::kDown)};
  const Range whole = {0, moe.expert_intermediate_size};
  std::vector<FfnShare> shares(num_ranks, {.columns = whole, .experts = {0, moe.num_experts}});
  if (options.expert_parallel) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      shares[rank].experts = SplitEvenly(moe.num_experts, num_ranks, rank);
    }
  } else {
    ASSIGN_OR_RETURN(const std::vector<Range> columns,
                     SplitFfn(FfnShapeOf(sizes, expert, whole.size(), moe.num_experts), bytes));
    for (int rank = 0; rank < num_ranks; ++rank) shares[rank].columns = columns[rank];
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    bytes[rank] += sizes.FileBytes(RouterTensor(spec, layer)) +
                   shares[rank].experts.size() * expert.Bytes(sizes, shares[rank].columns);
  }
  if (moe.shared_intermediate_size == 0) return shares;
  const FfnTensors shared = {SharedExpertsTensor(layer, FfnMatrix::kGate),
                             SharedExpertsTensor(layer, FfnMatrix::kUp),
                             SharedExpertsTensor(layer, FfnMatrix::kDown)};
  std::vector<Range> columns(num_ranks, {0, moe.shared_intermediate_size});
  if (!options.exchange_experts) {
    ASSIGN_OR_RETURN(columns,
                     SplitFfn(FfnShapeOf(sizes, shared, moe.shared_intermediate_size), bytes));
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    shares[rank].shared_columns = columns[rank];
    bytes[rank] += shared.Bytes(sizes, columns[rank]);
  }
  return shares;
}

absl::StatusOr<KvLayout> KvLayoutOf(const ModelSpec& spec, const ShardLayoutOptions& options,
                                    Range kv_heads) {
  if (spec.mla.has_value()) {
    return KvLayout::ForMla(options.page_size, options.kv_cache_dtype, kv_heads.size(),
                            spec.mla->kv_lora_rank, spec.mla->qk_rope_head_dim, spec.num_layers);
  }
  return KvLayout::ForGqa(options.page_size, options.kv_cache_dtype, kv_heads.begin,
                          kv_heads.size(), spec.head_dim, spec.windows);
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
  const TensorSizes sizes(spec, weights, options.weight_dtype);
  const int64_t vector_bytes = VectorBytes(weights, sizes);
  ShardLayout layout = {
      .grid = std::move(grid), .exchanges_experts = options.exchange_experts, .ranks = {}};
  const int num_ranks = layout.grid.num_ranks();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const KvGridRank& heads = layout.grid.rank(rank);
    ASSIGN_OR_RETURN(KvLayout kv, KvLayoutOf(spec, options, heads.kv_heads));
    const Range vocabulary = SplitVocabulary(spec.vocab_size, num_ranks, rank);
    int64_t bytes = vector_bytes + sizes.RowsBytes(kEmbeddingTensor, vocabulary);
    if (!spec.tie_word_embeddings) bytes += sizes.RowsBytes(kHeadTensor, vocabulary);
    layout.ranks.push_back({.heads = heads,
                            .ffn = {},
                            .vocabulary = vocabulary,
                            .weight_bytes = bytes,
                            .kv = std::move(kv)});
  }
  std::vector<int64_t> bytes(num_ranks);
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      bytes[rank] = AttentionBytes(spec, sizes, layer, layout.ranks[rank].heads);
    }
    ASSIGN_OR_RETURN(const std::vector<FfnShare> shares,
                     HasExperts(spec, layer) ? DealMoeFfn(spec, sizes, layer, options, bytes)
                                             : DealDenseFfn(spec, sizes, layer, bytes));
    for (int rank = 0; rank < num_ranks; ++rank) {
      layout.ranks[rank].ffn.push_back(shares[rank]);
      layout.ranks[rank].weight_bytes += bytes[rank];
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
  const int num_stripes = options.dp_attention ? 1 : layout.grid.num_stripes();
  if (!options.memory_bytes.has_value() || LeastMemory(layout) <= *options.memory_bytes) {
    return absl::OkStatus();
  }
  std::string advice = absl::StrCat("no count up to ", kMostRanksTried, " ranks fits");
  for (int n = num_ranks + num_stripes; n <= kMostRanksTried; n += num_stripes) {
    absl::StatusOr<KvGrid> grid = GridOf(spec, options, n, num_stripes);
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
  return requested.has_value() && !IsQuantised(in_checkpoint) ? *requested : in_checkpoint;
}

int64_t DefaultPageSize(const ModelSpec& spec) { return spec.mla.has_value() ? 64 : 16; }

bool CanExchangeExperts(const ModelSpec& spec, const ShardLayoutOptions& options) {
  return options.dp_attention && options.expert_parallel && spec.mla.has_value() &&
         spec.moe.has_value() && options.num_ranks > 1;
}

absl::StatusOr<ShardLayout> BuildShardLayout(const ModelSpec& spec, const WeightSource& weights,
                                             const ShardLayoutOptions& options) {
  CHECK(!options.exchange_experts || (options.dp_attention && options.expert_parallel));
  std::vector<std::string> reasons = ReasonsAgainstDpAttention(spec, options);
  absl::StatusOr<KvGrid> grid = GridOf(spec, options, options.num_ranks, options.num_stripes);
  const absl::Status refusal = grid.status();
  if (!refusal.ok()) {
    reasons.emplace_back(refusal.message());
    // Memory can be judged all the same where it is the stripes that do not fit.
    grid = KvGrid::Create(spec.total_query_heads, spec.total_kv_heads, options.num_ranks);
  }
  if (options.expert_parallel && !spec.moe.has_value()) {
    reasons.push_back(
        absl::StrCat("--enable-expert-parallel: a ", spec.model_type, " model has no experts"));
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
