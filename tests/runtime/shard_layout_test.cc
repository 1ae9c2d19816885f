#include "runtime/shard_layout.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using testing::HasSubstr;

// A checkpoint of which only names, shapes and dtypes are known.
class ShapesOnly : public WeightSource {
 public:
  ShapesOnly(const ModelSpec& spec, DType matrices) {
    for (ExpectedTensor& expected : ExpectedTensors(spec)) {
      const bool is_matrix = expected.shape.size() == 2;
      tensors_.push_back({std::move(expected.name), is_matrix ? matrices : DType::kFloat32,
                          std::move(expected.shape)});
    }
  }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const TensorInfo* Find(absl::string_view name) const override {
    for (const TensorInfo& tensor : tensors_) {
      if (tensor.name == name) return &tensor;
    }
    return nullptr;
  }
  absl::StatusOr<TensorSlice> Read(absl::string_view, Range, Range) override {
    return absl::UnimplementedError("a layout reads no weight");
  }
  absl::StatusOr<std::vector<float>> ReadVector(absl::string_view, Range) override {
    return absl::UnimplementedError("a layout reads no weight");
  }
  void Release(absl::string_view) override {}

 private:
  std::vector<TensorInfo> tensors_;
};

ModelSpec Llama(int64_t hidden, int64_t query_heads, int64_t kv_heads, int64_t head_dim,
                int64_t intermediate, int64_t vocab) {
  ModelSpec spec;
  spec.model_type = "llama";
  spec.vocab_size = vocab;
  spec.hidden_size = hidden;
  spec.intermediate_size = intermediate;
  spec.num_layers = 2;
  spec.total_query_heads = query_heads;
  spec.total_kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.windows.assign(spec.num_layers, 0);
  return spec;
}

ModelSpec GqaA() { return Llama(64, 8, 2, 8, 96, 259); }

ShardLayout LayoutOf(const ModelSpec& spec, int num_ranks, DType dtype = DType::kFloat32) {
  absl::StatusOr<ShardLayout> layout =
      BuildShardLayout(spec, ShapesOnly(spec, dtype), {.num_ranks = num_ranks});
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

int64_t PerLayerBytes(const ModelSpec& spec, const RankLayout& rank, int64_t layer) {
  const int64_t heads = 2 * rank.heads.query_heads.size() + 2 * rank.heads.kv_heads.size();
  return 4 * spec.hidden_size * (heads * spec.head_dim + 3 * rank.ffn[layer].columns.size());
}

// Everything is dealt exactly once but KV heads that are shared, and bytes say the same.
TEST(ShardLayout, EveryShareIsDealtOnce) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t kv_heads = 1 + random() % 8;
    ModelSpec spec = Llama(32, kv_heads * (1 + random() % 5), kv_heads, 8, 1 + random() % 200,
                           1 + random() % 12000);
    spec.tie_word_embeddings = random() % 2 == 0;
    const int num_ranks = 1 + random() % 9;
    const ShardLayout layout = LayoutOf(spec, num_ranks);
    ASSERT_EQ(static_cast<int>(layout.ranks.size()), num_ranks);

    int64_t next_query_head = 0, next_id = 0, kv_heads_held = 0, bytes = 0;
    std::set<int64_t> kv_heads_seen;
    std::vector<int64_t> next_column(spec.num_layers, 0);
    for (const RankLayout& rank : layout.ranks) {
      EXPECT_EQ(rank.heads.query_heads.begin, next_query_head);
      next_query_head = rank.heads.query_heads.end;
      EXPECT_EQ(rank.vocabulary.begin, next_id);
      next_id = rank.vocabulary.end;
      ASSERT_EQ(static_cast<int64_t>(rank.ffn.size()), spec.num_layers);
      for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
        EXPECT_EQ(rank.ffn[layer].columns.begin, next_column[layer]);
        next_column[layer] = rank.ffn[layer].columns.end;
      }
      const Range kv = rank.heads.kv_heads;
      kv_heads_held += kv.size();
      for (int64_t head = kv.begin; head < kv.end; ++head) kv_heads_seen.insert(head);
      EXPECT_EQ(rank.kv.bytes_per_token(), 2 * kv.size() * spec.head_dim * 4 * spec.num_layers);
      EXPECT_EQ(kv.empty(), rank.heads.query_heads.empty());
      bytes += rank.weight_bytes;
    }
    EXPECT_EQ(next_query_head, spec.total_query_heads);
    EXPECT_EQ(next_id, spec.vocab_size);
    for (const int64_t next : next_column) EXPECT_EQ(next, spec.intermediate_size);
    EXPECT_EQ(static_cast<int64_t>(kv_heads_seen.size()), spec.total_kv_heads);

    // Matrices once, vectors and the extra copies of shared KV heads on top.
    int64_t expected = 0;
    for (const ExpectedTensor& tensor : ExpectedTensors(spec)) {
      const bool is_matrix = tensor.shape.size() == 2;
      expected += 4 * tensor.shape[0] * (is_matrix ? tensor.shape[1] : num_ranks);
    }
    expected += spec.num_layers * (kv_heads_held - spec.total_kv_heads) * 2 * spec.head_dim *
                spec.hidden_size * 4;
    EXPECT_EQ(bytes, expected);
  }
}

TEST(ShardLayout, FfnColumnsMakeUpForUnevenHeads) {
  const ModelSpec smollm2 = Llama(576, 9, 3, 64, 1536, 49152);
  for (const int num_ranks : {2, 3, 4, 5, 8}) {
    const ShardLayout layout = LayoutOf(smollm2, num_ranks);
    int64_t least = PerLayerBytes(smollm2, layout.ranks[0], 0), most = least;
    for (const RankLayout& rank : layout.ranks) {
      least = std::min(least, PerLayerBytes(smollm2, rank, 0));
      most = std::max(most, PerLayerBytes(smollm2, rank, 0));
    }
    EXPECT_LE(most - least, 3 * 576 * 4) << num_ranks;  // one column
  }
  const ShardLayout two = LayoutOf(smollm2, 2);
  EXPECT_EQ(two.ranks[0].heads.query_heads.size(), 6);
  EXPECT_LT(two.ranks[0].ffn[0].columns.size(), two.ranks[1].ffn[0].columns.size());
}

TEST(ShardLayout, QuantisedColumnsAreCutAtBlocks) {
  const ModelSpec spec = Llama(256, 4, 4, 64, 11008, 32000);
  const ShardLayout layout = LayoutOf(spec, 4, DType::kQ4_K);
  std::vector<int64_t> blocks;
  for (const RankLayout& rank : layout.ranks) {
    EXPECT_EQ(rank.ffn[0].columns.size() % 256, 0);
    blocks.push_back(rank.ffn[0].columns.size() / 256);
  }
  EXPECT_THAT(blocks, testing::ElementsAre(11, 11, 11, 10));
}

// Heads of 24 dimensions: blocks of 32 columns of o_proj are cut, and held by both neighbours.
TEST(ShardLayout, BlocksThatHeadsCutCountOnBothSides) {
  const ModelSpec spec = Llama(96, 4, 4, 24, 96, 100);
  const ShardLayout one = LayoutOf(spec, 1, DType::kQ8_0);
  const ShardLayout two = LayoutOf(spec, 2, DType::kQ8_0);
  // Two heads are 48 columns: blocks 0, 1 and 1, 2. Vectors are counted on both.
  const int64_t vectors = (2 * spec.num_layers + 1) * spec.hidden_size * 4;
  const int64_t cut_blocks = spec.num_layers * spec.hidden_size * BlockBytes(DType::kQ8_0);
  EXPECT_EQ(two.ranks[0].weight_bytes + two.ranks[1].weight_bytes,
            one.ranks[0].weight_bytes + vectors + cut_blocks);
}

TEST(ShardLayout, SharedKvHeadsCostOneHeadEach) {
  const ModelSpec spec = GqaA();
  for (const int num_ranks : {4, 8}) {
    const ShardLayout layout = LayoutOf(spec, num_ranks);
    EXPECT_EQ(layout.grid.total_kv_heads(), 2);
    for (const RankLayout& rank : layout.ranks) {
      EXPECT_EQ(rank.kv.bytes_per_token(), 2 * 8 * 4 * 2);  // K and V, head_dim, float32, layers
    }
  }
}

TEST(ShardLayout, MoreRanksThanQueryHeads) {
  const ModelSpec mqa = Llama(32, 4, 1, 8, 64, 259);
  const ShardLayout layout = LayoutOf(mqa, 8);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(layout.ranks[rank].heads.query_heads.size(), rank < 4 ? 1 : 0);
    EXPECT_EQ(layout.ranks[rank].kv.bytes_per_page() > 0, rank < 4);
    EXPECT_FALSE(layout.ranks[rank].ffn[0].columns.empty());
  }
}

TEST(ShardLayout, ATiedTableCountsOnce) {
  ModelSpec spec = GqaA();
  const int64_t untied = LayoutOf(spec, 2).ranks[0].weight_bytes;
  spec.tie_word_embeddings = true;
  const ShardLayout tied = LayoutOf(spec, 2);
  EXPECT_EQ(untied - tied.ranks[0].weight_bytes, tied.ranks[0].vocabulary.size() * 64 * 4);
}

TEST(ShardLayout, TheRequestedTypeChangesPlainWeightsAlone) {
  EXPECT_EQ(StoredDType(DType::kFloat32, DType::kBFloat16), DType::kBFloat16);
  EXPECT_EQ(StoredDType(DType::kFloat32, std::nullopt), DType::kFloat32);
  EXPECT_EQ(StoredDType(DType::kQ4_K, DType::kBFloat16), DType::kQ4_K);
  const ModelSpec spec = GqaA();
  const auto halved =
      BuildShardLayout(spec, ShapesOnly(spec, DType::kFloat32), {.weight_dtype = DType::kBFloat16});
  ASSERT_TRUE(halved.ok());
  const int64_t vectors = 5 * 64 * 4;
  EXPECT_EQ(2 * (halved->ranks[0].weight_bytes - vectors),
            LayoutOf(spec, 1).ranks[0].weight_bytes - vectors);
}

TEST(ShardLayout, ARefusalNamesTheSmallestCountThatFits) {
  const ModelSpec spec = GqaA();
  const ShapesOnly weights(spec, DType::kFloat32);
  const auto fits = [&](int num_ranks, int64_t memory) {
    return BuildShardLayout(spec, weights, {.num_ranks = num_ranks, .memory_bytes = memory});
  };
  const int64_t needed_by_three = [&] {
    int64_t most = 0;
    for (const RankLayout& rank : LayoutOf(spec, 3).ranks) {
      most = std::max(most, rank.weight_bytes + rank.kv.bytes_per_page());
    }
    return most;
  }();
  EXPECT_TRUE(fits(3, needed_by_three).ok());
  const absl::Status refused = fits(1, needed_by_three).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("of 1 rank the fullest"),
                             HasSubstr("the smallest count that fits is 3"),
                             HasSubstr(std::to_string(needed_by_three))));
  EXPECT_THAT(std::string(fits(1, 100).status().message()),
              HasSubstr("no count up to 256 ranks fits"));
}

TEST(ShardLayout, EveryReasonIsGivenAtOnce) {
  const ModelSpec spec = GqaA();
  const absl::Status refused =
      BuildShardLayout(spec, ShapesOnly(spec, DType::kFloat32),
                       {.num_ranks = 3, .num_stripes = 2, .memory_bytes = 1000})
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("2"), HasSubstr("1, 3"), HasSubstr("has 1000")));
  EXPECT_THAT(std::string(BuildShardLayout(spec, ShapesOnly(spec, DType::kFloat32),
                                           {.num_ranks = 0, .weight_dtype = DType::kInt8})
                              .status()
                              .message()),
              testing::AllOf(HasSubstr("0"), HasSubstr("not int8")));
}

// Shapes of DeepSeek-V3, made small: 5 heads, 7 experts, a leading dense layer.
ModelSpec DeepSeek() {
  ModelSpec spec = Llama(64, 5, 1, 12, 96, 259);
  spec.model_type = "deepseek_v3";
  spec.mla = {.q_lora_rank = 24,
              .kv_lora_rank = 16,
              .qk_nope_head_dim = 8,
              .qk_rope_head_dim = 4,
              .v_head_dim = 6};
  spec.moe.emplace();
  spec.moe->num_experts = 7;
  spec.moe->num_experts_per_token = 2;
  spec.moe->expert_intermediate_size = 10;
  spec.moe->shared_intermediate_size = 40;
  spec.moe->layers = {false, true};
  spec.moe->correction_bias = true;
  return spec;
}

int64_t Elements(const ModelSpec& spec, bool vectors) {
  int64_t elements = 0;
  for (const ExpectedTensor& tensor : ExpectedTensors(spec)) {
    const bool is_vector = tensor.shape.size() == 1;
    if (is_vector == vectors) elements += tensor.shape[0] * (is_vector ? 1 : tensor.shape[1]);
  }
  return elements;
}

TEST(ShardLayout, LatentsAndExpertsAreDealtOnce) {
  const ModelSpec spec = DeepSeek();
  // Held by every rank: projections to the latents, the router, and vectors.
  const int64_t mirrored = 2 * (24 + 20) * 64 + 7 * 64 + Elements(spec, /*vectors=*/true);
  const int64_t absorbed = 2 * 5 * (8 + 6) * 16;  // kv_b a second time
  const int64_t total = Elements(spec, false) + Elements(spec, true) + absorbed;
  for (const bool expert_parallel : {false, true}) {
    for (const int num_ranks : {1, 2, 3, 4, 6, 8}) {
      SCOPED_TRACE(testing::Message()
                   << num_ranks << " ranks, expert parallel " << expert_parallel);
      const absl::StatusOr<ShardLayout> layout =
          BuildShardLayout(spec, ShapesOnly(spec, DType::kFloat32),
                           {.num_ranks = num_ranks, .expert_parallel = expert_parallel});
      ASSERT_TRUE(layout.ok()) << layout.status();
      int64_t bytes = 0, heads = 0, experts = 0, columns = 0, shared = 0, dense = 0;
      for (const RankLayout& rank : layout->ranks) {
        bytes += rank.weight_bytes;
        heads += rank.heads.query_heads.size();
        dense += rank.ffn[0].columns.size();
        EXPECT_TRUE(rank.ffn[0].experts.empty() && rank.ffn[0].shared_columns.empty());
        experts += rank.ffn[1].experts.size();
        columns += rank.ffn[1].columns.size();
        EXPECT_EQ(rank.ffn[1].shared_columns.begin, shared);
        shared = rank.ffn[1].shared_columns.end;
        // One latent a token, whatever the ranks; none where nobody would read it.
        EXPECT_EQ(rank.kv.bytes_per_token(),
                  rank.heads.query_heads.empty() ? 0 : (16 + 4) * 4 * spec.num_layers);
      }
      EXPECT_EQ(bytes, 4 * (total + (num_ranks - 1) * mirrored));
      EXPECT_EQ(heads, 5);
      EXPECT_EQ(dense, 96);
      EXPECT_EQ(shared, 40);
      EXPECT_EQ(experts, expert_parallel ? 7 : 7 * num_ranks);
      EXPECT_EQ(columns, expert_parallel ? 10 * num_ranks : 10);
    }
  }
}

// Attention whole on every rank, all else dealt, and a page of a sequence on one rank alone.
TEST(ShardLayout, DataParallelAttentionIsWholeOnEveryRank) {
  const ModelSpec spec = DeepSeek();
  const ShapesOnly weights(spec, DType::kFloat32);
  const int64_t absorbed = 2 * 5 * (8 + 6) * 16;
  const int64_t attention =  // q_a, q_b, kv_a, kv_b and o
      2 * (24 * 64 + 60 * 24 + 20 * 64 + 70 * 16 + 64 * 30) + absorbed;
  const int64_t mirrored = attention + 7 * 64 + Elements(spec, /*vectors=*/true);
  const int64_t total = Elements(spec, false) + Elements(spec, true) + absorbed;
  for (const bool expert_parallel : {false, true}) {
    for (const int num_ranks : {1, 3, 8}) {
      const absl::StatusOr<ShardLayout> layout = BuildShardLayout(
          spec, weights,
          {.num_ranks = num_ranks, .dp_attention = true, .expert_parallel = expert_parallel});
      ASSERT_TRUE(layout.ok()) << layout.status();
      EXPECT_EQ(layout->grid.num_stripes(), num_ranks);
      int64_t bytes = 0;
      for (const RankLayout& rank : layout->ranks) {
        bytes += rank.weight_bytes;
        EXPECT_EQ(rank.heads.query_heads.size(), 5);
        EXPECT_EQ(rank.kv.bytes_per_token(), (16 + 4) * 4 * spec.num_layers);
      }
      EXPECT_EQ(bytes, 4 * (total + (num_ranks - 1) * mirrored));
    }
  }
  EXPECT_THAT(
      std::string(
          BuildShardLayout(spec, weights, {.num_ranks = 2, .dp_attention = true, .memory_bytes = 1})
              .status()
              .message()),
      HasSubstr("no count up to 256 ranks fits"));
}

TEST(ShardLayout, SharedExpertsAreWholeWhereTokensTravel) {
  const ModelSpec spec = DeepSeek();
  const auto layout = BuildShardLayout(
      spec, ShapesOnly(spec, DType::kFloat32),
      {.num_ranks = 3, .dp_attention = true, .expert_parallel = true, .exchange_experts = true});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_TRUE(layout->exchanges_experts);
  int64_t experts = 0;
  for (const RankLayout& rank : layout->ranks) {
    experts += rank.ffn[1].experts.size();
    EXPECT_EQ(rank.ffn[1].shared_columns, (Range{0, 40}));
  }
  EXPECT_EQ(experts, 7);
}

TEST(ShardLayout, DataParallelAttentionNeedsLatentsAndNoStripes) {
  const absl::Status refused =
      BuildShardLayout(GqaA(), ShapesOnly(GqaA(), DType::kFloat32),
                       {.num_ranks = 2, .num_stripes = 2, .dp_attention = true})
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("--enable-dp-attention: a llama model has no latents"),
                             HasSubstr("--decode-context-parallel-size 2: --enable-dp-attention "
                                       "keeps each sequence whole on one rank")));
}

// Seven experts on three ranks are 3, 2, 2: the shared ones go to those with fewer.
TEST(ShardLayout, SharedExpertsEvenOutRoutedOnes) {
  const ModelSpec spec = DeepSeek();
  const absl::StatusOr<ShardLayout> layout = BuildShardLayout(
      spec, ShapesOnly(spec, DType::kFloat32), {.num_ranks = 3, .expert_parallel = true});
  ASSERT_TRUE(layout.ok()) << layout.status();
  const auto share = [&](int rank) { return layout->ranks[rank].ffn[1]; };
  EXPECT_EQ(share(0).experts.size(), 3);
  EXPECT_EQ(share(2).experts.size(), 2);
  EXPECT_LT(share(0).shared_columns.size() + 5, share(2).shared_columns.size());
}

TEST(ShardLayout, RouterStaysAsTheCheckpointHasIt) {
  const ModelSpec spec = DeepSeek();
  const ShapesOnly weights(spec, DType::kFloat32);
  const auto bytes = [&](std::optional<DType> dtype) {
    return BuildShardLayout(spec, weights, {.num_ranks = 1, .weight_dtype = dtype})
        ->MaxWeightBytes();
  };
  const int64_t narrowed = Elements(spec, false) + 2 * 5 * (8 + 6) * 16 - 7 * 64;
  EXPECT_EQ(bytes(std::nullopt) - bytes(DType::kBFloat16), 2 * narrowed);
}

TEST(ShardLayout, ExpertParallelNeedsExperts) {
  const absl::Status refused =
      BuildShardLayout(GqaA(), ShapesOnly(GqaA(), DType::kFloat32), {.expert_parallel = true})
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("--enable-expert-parallel: a llama model has no experts"));
}

// 96 columns in blocks of 16: whole blocks on up to six ranks, any columns on more.
TEST(ShardLayout, BlockFp8TakesAByteAndItsScales) {
  ModelSpec spec = GqaA();
  spec.block_fp8 = {.block_rows = 32, .block_columns = 16};
  const ShapesOnly weights(spec, DType::kFloat8E4M3);
  for (const int num_ranks : {1, 2, 3, 5, 7}) {
    const absl::StatusOr<ShardLayout> layout =
        BuildShardLayout(spec, weights, {.num_ranks = num_ranks, .weight_dtype = DType::kFloat32});
    ASSERT_TRUE(layout.ok()) << layout.status();
    bool cuts = false;
    for (const RankLayout& rank : layout->ranks) {
      // A scale for each row and block of columns, those of a cut block on both sides.
      const auto matrix = [](int64_t rows, Range cols) {
        const int64_t blocks = cols.empty() ? 0 : (cols.end + 15) / 16 - cols.begin / 16;
        return rows * (cols.size() + 4 * blocks);
      };
      const Range hidden = {0, 64};
      int64_t bytes = 2 * matrix(rank.vocabulary.size(), hidden) + 5 * 64 * 4;
      for (int64_t layer = 0; layer < 2; ++layer) {
        const Range columns = rank.ffn[layer].columns;
        const Range query_rows = rank.heads.query_heads.ScaledBy(8);
        bytes += matrix(query_rows.size() + 2 * 8 * rank.heads.kv_heads.size(), hidden) +
                 matrix(64, query_rows) + matrix(2 * columns.size(), hidden) + matrix(64, columns);
        cuts = cuts || columns.begin % 16 != 0;
      }
      EXPECT_EQ(rank.weight_bytes, bytes);
    }
    EXPECT_EQ(cuts, num_ranks > 6);
  }
}

}  // namespace
}  // namespace heddle
