#include "runtime/model/weights.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
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
    EXPECT_EQ(unreleased_, "") << "not released before " << name;
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
      EXPECT_GE(weights->bytes() * 1.0, layout->ranks[rank].weight_bytes * 0.9);
      EXPECT_LE(weights->bytes() * 1.0, layout->ranks[rank].weight_bytes * 1.6);
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
      EXPECT_EQ(layer.o.bias != nullptr, rank == 0);
      EXPECT_EQ(layer.ffn.down.bias != nullptr, rank == 0);
      EXPECT_NE(layer.q.bias, nullptr);
      EXPECT_NE(layer.ffn.gate.bias, nullptr);
    }
  }
}

TEST(LoadWeights, RanksWithoutHeadsHoldNoneOfTheirWeights) {
  Model model = Open("mqa");  // 4 query heads, 1 KV head
  const auto weights = model.Load(8, 7);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->layers[0].q.weight.n, 0);
  EXPECT_EQ(weights->layers[0].k.weight.n, 0);
  EXPECT_EQ(weights->layers[0].o.weight.k, 0);
  EXPECT_EQ(weights->layers[0].o.weight.n, 32);
  EXPECT_GT(weights->layers[0].ffn.gate.weight.n, 0);
}

TEST(LoadWeights, KeepsTheFilesTypeUnlessAsked) {
  Model model = Open("gqa-odd");
  EXPECT_EQ(model.Load(1, 0)->layers[0].ffn.up.weight.dtype, DType::kBFloat16);
  EXPECT_EQ(model.Load(1, 0, {.dtype = DType::kFloat32})->layers[0].ffn.up.weight.dtype,
            DType::kFloat32);
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
