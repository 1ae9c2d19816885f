#include "runtime/model/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/dequantise.h"
#include "kernels/kernel_table.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/shard_layout.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using testing::HasSubstr;

// Watches what is read from another source, and may make one tensor huge.
class WatchedSource : public WeightSource {
 public:
  explicit WatchedSource(WeightSource& source) : source_(source) {}

  const std::vector<TensorInfo>& tensors() const override { return source_.tensors(); }
  const TensorInfo* Find(absl::string_view name) const override { return source_.Find(name); }

  absl::StatusOr<TensorSlice> Read(absl::string_view name, Range rows, Range cols) override {
    EXPECT_TRUE(alive_.expired()) << name << " is read while another slice is alive";
    // One tensor may be read in several slices.
    EXPECT_TRUE(unreleased_.empty() || unreleased_ == name)
        << unreleased_ << " not released before " << name;
    unreleased_ = std::string(name);
    reads[std::string(name)] = {rows, cols};
    auto slice = source_.Read(name, rows, cols);
    if (!slice.ok()) return slice;
    if (name == huge_tensor) {
      slice->rows.dtype = DType::kFloat32;
      auto values = std::make_shared<std::vector<float>>(rows.size() * cols.size(), 1e5f);
      slice->rows.data = reinterpret_cast<const std::byte*>(values->data());
      slice->rows.row_stride_bytes = cols.size() * static_cast<int64_t>(sizeof(float));
      slice->keep_alive = values;
    }
    // Owns the rows, so that its life is seen even where the file's mapping would keep them.
    auto alive = std::make_shared<std::shared_ptr<const void>>(slice->keep_alive);
    alive_ = alive;
    slice->keep_alive = alive;
    return slice;
  }
  absl::StatusOr<std::vector<float>> ReadVector(absl::string_view name, Range range) override {
    EXPECT_EQ(unreleased_, "") << "not released before " << name;
    unreleased_ = std::string(name);
    reads[std::string(name)] = {range, {}};
    return source_.ReadVector(name, range);
  }
  void Release(absl::string_view name) override {
    EXPECT_EQ(unreleased_, name);
    EXPECT_TRUE(alive_.expired()) << name;
    unreleased_.clear();
    source_.Release(name);
  }

  std::string huge_tensor;
  std::map<std::string, std::pair<Range, Range>> reads;

 private:
  WeightSource& source_;
  std::string unreleased_;
  std::weak_ptr<const void> alive_;
};

struct Model {
  Checkpoint checkpoint;
  std::unique_ptr<WatchedSource> source;
  std::unique_ptr<Backend> backend = CreateCpuBackend({.stream_mode = CpuStreamMode::kDeferred});
  std::unique_ptr<Stream> stream = *backend->CreateStream();

  absl::StatusOr<ModelWeights> Load(int num_ranks, int rank,
                                    const WeightLoadOptions& options = {}) {
    source->reads.clear();
    const auto layout = BuildShardLayout(checkpoint.spec, *checkpoint.weights,
                                         {.num_ranks = num_ranks, .weight_dtype = options.dtype});
    if (!layout.ok()) return layout.status();
    auto weights = LoadWeights(checkpoint.spec, *layout, rank, *source, options, *backend, *stream);
    // What `inspect` says is what a rank holds, but for padding and vectors that are cut.
    if (weights.ok()) {
      EXPECT_GE(static_cast<double>(weights->bytes), layout->ranks[rank].weight_bytes * 0.9);
      // A share of a small expert is mostly padding.
      const double most = checkpoint.spec.moe.has_value() ? 2.0 : 1.6;
      EXPECT_LE(static_cast<double>(weights->bytes), layout->ranks[rank].weight_bytes * most);
    }
    return weights;
  }
};

Model Open(absl::string_view name) {
  Model model;
  const auto golden = LoadGoldenModel(name);
  EXPECT_TRUE(golden.ok()) << golden.status();
  auto checkpoint = OpenCheckpoint(golden->path, LoadFormat::kAuto, 0);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  model.checkpoint = *std::move(checkpoint);
  model.source = std::make_unique<WatchedSource>(*model.checkpoint.weights);
  return model;
}

const GqaWeights& Gqa(const LayerWeights& layer) { return std::get<GqaWeights>(layer.attention); }
const DenseFfnWeights& DenseFfn(const LayerWeights& layer) {
  return std::get<DenseFfnWeights>(layer.ffn);
}

TEST(LoadWeights, ReadsItsOwnSlicesOneAtATime) {
  Model model = Open("gqa-odd");  // 6 query and 3 KV heads of 8, hidden 48
  std::vector<std::string> progress;
  WeightLoadOptions options;
  options.on_progress = [&](absl::string_view tensor) { progress.emplace_back(tensor); };
  ASSERT_TRUE(model.Load(2, 1, options).ok());
  const auto& reads = model.source->reads;
  const auto rows = [&](const std::string& name) { return reads.at(name).first; };
  const auto cols = [&](const std::string& name) { return reads.at(name).second; };
  EXPECT_EQ(rows("model.layers.0.self_attn.q_proj.weight"), (Range{32, 48}));
  EXPECT_EQ(rows("model.layers.0.self_attn.k_proj.weight"), (Range{16, 24}));
  EXPECT_EQ(rows("model.layers.0.self_attn.v_proj.weight"), (Range{16, 24}));
  EXPECT_EQ(rows("model.layers.0.self_attn.o_proj.weight"), (Range{0, 48}));
  EXPECT_EQ(cols("model.layers.0.self_attn.o_proj.weight"), (Range{32, 48}));
  EXPECT_EQ(rows("model.layers.1.mlp.up_proj.weight"), cols("model.layers.1.mlp.down_proj.weight"));
  EXPECT_EQ(rows("model.layers.1.mlp.up_proj.weight").end, 80);
  EXPECT_EQ(rows("lm_head.weight"), rows("model.embed_tokens.weight"));
  EXPECT_EQ(rows("model.norm.weight"), (Range{0, 48}));
  // Every tensor of the model is read once, and reported.
  EXPECT_EQ(reads.size(), model.source->tensors().size());
  EXPECT_EQ(progress.size(), model.source->tensors().size());
}

TEST(LoadWeights, ATiedHeadIsTheEmbedding) {
  Model model = Open("tied");
  for (const int rank : {0, 1}) {
    const auto weights = model.Load(2, rank);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(weights->head.data, weights->embedding.data);
    EXPECT_EQ(weights->head.n, weights->embedding.n);
    EXPECT_EQ(model.source->reads.count("lm_head.weight"), 0u);
  }
}

TEST(LoadWeights, BiasesOfPartialSumsAreOnOneRank) {
  Model model = Open("llama-biases");
  for (const int rank : {0, 1, 2}) {
    const auto weights = model.Load(3, rank);
    ASSERT_TRUE(weights.ok()) << weights.status();
    for (const LayerWeights& layer : weights->layers) {
      EXPECT_EQ(Gqa(layer).o.bias != nullptr, rank == 0);
      EXPECT_EQ(DenseFfn(layer).down.bias != nullptr, rank == 0);
      EXPECT_NE(Gqa(layer).q.bias, nullptr);
      EXPECT_NE(DenseFfn(layer).gate.bias, nullptr);
    }
  }
}

TEST(LoadWeights, RanksWithoutHeadsHoldNoneOfTheirWeights) {
  Model model = Open("mqa");  // 4 query heads, 1 KV head
  const auto weights = model.Load(8, 7);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const GqaWeights& attention = Gqa(weights->layers[0]);
  EXPECT_EQ(attention.q.weight.n, 0);
  EXPECT_EQ(attention.k.weight.n, 0);
  EXPECT_EQ(attention.o.weight.k, 0);
  EXPECT_EQ(attention.o.weight.n, 32);
  EXPECT_GT(DenseFfn(weights->layers[0]).gate.weight.n, 0);
}

TEST(LoadWeights, KeepsTheFilesTypeUnlessAsked) {
  Model model = Open("gqa-odd");
  const auto dtype = [&](const WeightLoadOptions& options) {
    return DenseFfn(model.Load(1, 0, options)->layers[0]).up.weight.dtype;
  };
  EXPECT_EQ(dtype({}), DType::kBFloat16);
  EXPECT_EQ(dtype({.dtype = DType::kFloat32}), DType::kFloat32);
}

// 4 heads of nope 8, rope 4, v 8 on 3 ranks; latent 16; 8 experts, 1 shared.
TEST(LoadWeights, LatentsAndRouterAreOnEveryRank) {
  Model model = Open("mla-lite");
  for (const int rank : {0, 1, 2}) {
    const auto weights = model.Load(3, rank);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const int64_t heads = rank == 0 ? 2 : 1;
    const auto& mla = std::get<MlaWeights>(weights->layers[1].attention);
    EXPECT_EQ(mla.q_a.weight.n, 0);
    EXPECT_EQ(mla.q_b.weight.n, heads * 12);
    EXPECT_EQ(mla.kv_a.weight.n, 20);
    EXPECT_EQ(mla.kv_b.n, heads * 16);
    EXPECT_EQ(mla.absorbed_k.count, heads);
    EXPECT_EQ(mla.absorbed_k.first.n, 16);
    EXPECT_EQ(mla.absorbed_k.first.k, 8);
    EXPECT_EQ(mla.absorbed_v.first.n, 8);
    EXPECT_EQ(mla.absorbed_v.first.k, 16);
    EXPECT_EQ(mla.o.weight.k, heads * 8);
    EXPECT_TRUE(std::holds_alternative<DenseFfnWeights>(weights->layers[0].ffn));
    const auto& moe = std::get<MoeWeights>(weights->layers[1].ffn);
    EXPECT_EQ(moe.router.n, 8);
    EXPECT_EQ(moe.experts, (Range{0, 8}));
    EXPECT_EQ(moe.gate.count, 8);
    EXPECT_EQ(moe.gate.first.n, moe.down.first.k);
  }
}

TEST(LoadWeights, TheRouterIsNeverNarrowed) {
  Model model = Open("mla-lite");
  const auto weights = model.Load(1, 0, {.dtype = DType::kFloat16});
  ASSERT_TRUE(weights.ok()) << weights.status();
  const auto& moe = std::get<MoeWeights>(weights->layers[1].ffn);
  EXPECT_EQ(moe.router.dtype, DType::kBFloat16);
  EXPECT_EQ(moe.up.first.dtype, DType::kFloat16);
}

// W x with the row-th weights of a stack, against double precision.
void ExpectProduct(Model& model, const PackedWeight& weight,
                   const std::vector<std::vector<float>>& rows) {
  ASSERT_EQ(weight.n, static_cast<int64_t>(rows.size()));
  std::vector<float> x(weight.k), out(weight.n);
  for (int64_t i = 0; i < weight.k; ++i) x[i] = static_cast<float>(i % 5) - 1.5f;
  ASSERT_TRUE(model.backend->kernels()
                  .linear({FloatMatrix(x.data(), 1, weight.k), weight, nullptr,
                           FloatMatrix(out.data(), 1, weight.n)},
                          *model.stream)
                  .ok());
  ASSERT_TRUE(model.stream->Synchronize().ok());
  for (int64_t i = 0; i < weight.n; ++i) {
    ASSERT_EQ(rows[i].size(), x.size());
    double sum = 0, scale = 0;
    for (int64_t j = 0; j < weight.k; ++j) {
      sum += static_cast<double>(x[j]) * rows[i][j];
      scale += std::fabs(static_cast<double>(x[j]) * rows[i][j]);
    }
    EXPECT_NEAR(out[i], sum, 1e-5 * scale);
  }
}

// kv_b in blocks of 16 rows, which heads of 8 + 6 rows cut: what is absorbed is as wide as its
// source, whatever type is asked for.
TEST(LoadWeights, AbsorbedFloat8IsNotRoundedAgain) {
  Model model = Open("mla-v3-fp8");
  const std::string name = "model.layers.1.self_attn.kv_b_proj.weight";
  std::vector<std::vector<float>> kv_b(56, std::vector<float>(16));
  {
    const auto slice = model.checkpoint.weights->Read(name, {0, 56}, {0, 16});
    ASSERT_TRUE(slice.ok()) << slice.status();
    for (int64_t row = 0; row < 56; ++row) {
      ASSERT_TRUE(DequantiseRow(slice->rows, row, kv_b[row].data()).ok());
    }
  }
  for (const std::optional<DType> dtype : {std::optional<DType>(), {DType::kBFloat16}}) {
    for (const int rank : {0, 1, 2}) {
      const auto weights = model.Load(3, rank, {.dtype = dtype});
      ASSERT_TRUE(weights.ok()) << weights.status();
      const auto& mla = std::get<MlaWeights>(weights->layers[1].attention);
      EXPECT_EQ(mla.absorbed_k.first.dtype, DType::kFloat32);
      EXPECT_EQ(mla.absorbed_v.first.dtype, DType::kFloat8E4M3);
      EXPECT_EQ(mla.kv_b.dtype, DType::kFloat8E4M3);
      EXPECT_EQ(mla.o.weight.dtype, DType::kFloat8E4M3);
      const int64_t first_head = rank == 0 ? 0 : rank + 1;
      ASSERT_EQ(mla.absorbed_k.count, rank == 0 ? 2 : 1);
      for (int64_t i = 0; i < mla.absorbed_k.count; ++i) {
        const auto head = kv_b.begin() + (first_head + i) * 14;
        std::vector<std::vector<float>> transposed(16, std::vector<float>(8));
        for (int64_t row = 0; row < 16; ++row) {
          for (int64_t col = 0; col < 8; ++col) transposed[row][col] = head[col][row];
        }
        ExpectProduct(model, mla.absorbed_k.at(i), transposed);
        ExpectProduct(model, mla.absorbed_v.at(i), {head + 8, head + 14});
      }
    }
  }
}

TEST(LoadWeights, AValueThatOverflowsIsRefusedByName) {
  Model model = Open("gqa-a");
  model.source->huge_tensor = "model.layers.1.mlp.down_proj.weight";
  const absl::Status refused = model.Load(2, 1, {.dtype = DType::kFloat16}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("model.layers.1.mlp.down_proj.weight"));
  Model wide = Open("gqa-a");
  wide.source->huge_tensor = model.source->huge_tensor;
  EXPECT_TRUE(wide.Load(2, 1, {.dtype = DType::kBFloat16}).ok());
}

}  // namespace
}  // namespace heddle
