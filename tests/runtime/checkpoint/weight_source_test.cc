#include "runtime/checkpoint/weight_source.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/runtime/checkpoint/files.h"
#include "tests/runtime/checkpoint/open.h"

namespace heddle {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kUp[] = "model.layers.1.mlp.up_proj.weight";

// Columns of a row-major matrix of `row_bytes` a row.
std::string CutColumns(const std::string& matrix, size_t row_bytes, size_t begin, size_t end) {
  std::string cut;
  for (size_t row = 0; row * row_bytes < matrix.size(); ++row) {
    cut += matrix.substr(row * row_bytes + begin, end - begin);
  }
  return cut;
}

json ReadConfig(const TemporaryDirectory& directory) {
  return json::parse(ReadFile(directory.path() + "/config.json"));
}

TEST(WeightSource, SlicesArePartsOfTheWhole) {
  for (const char* name : {"gqa-a", "gqa-odd", "hd"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint = MustOpen(GoldenPath(name));
    const TensorInfo info = *checkpoint.weights->Find(kUp);
    const int64_t rows = info.shape[0];
    const int64_t cols = info.shape[1];
    const size_t element = BlockBytes(info.dtype);
    const std::string whole = SliceBytes(MustRead(*checkpoint.weights, kUp, {0, rows}, {0, cols}));
    ASSERT_EQ(whole.size(), rows * cols * element);
    for (const Range row_range : {Range{0, 1}, Range{3, 17}, Range{rows - 1, rows}}) {
      for (const Range col_range :
           {Range{0, cols}, Range{0, 1}, Range{5, 19}, Range{cols - 1, cols}}) {
        const TensorSlice slice = MustRead(*checkpoint.weights, kUp, row_range, col_range);
        EXPECT_EQ(slice.rows.n, row_range.size());
        EXPECT_EQ(slice.rows.k, col_range.size());
        EXPECT_EQ(slice.rows.k_offset, 0);
        const std::string row_part =
            whole.substr(row_range.begin * cols * element, row_range.size() * cols * element);
        EXPECT_EQ(SliceBytes(slice), CutColumns(row_part, cols * element, col_range.begin * element,
                                                col_range.end * element));
      }
    }
    for (const auto& [row_range, col_range] : std::vector<std::pair<Range, Range>>{
             {{4, 4}, {0, cols}}, {{0, rows}, {7, 7}}, {{rows, rows}, {cols, cols}}}) {
      const TensorSlice slice = MustRead(*checkpoint.weights, kUp, row_range, col_range);
      EXPECT_EQ(slice.rows.n, row_range.size());
      EXPECT_EQ(slice.rows.k, col_range.size());
    }
  }
}

TEST(WeightSource, ColumnsMayCutABlock) {
  // A tied Q8_0 model: down_proj is [64, 96], three blocks of 32 a row.
  const Checkpoint checkpoint =
      MustOpen(absl::StrCat(HEDDLE_TESTS_DIR, "/golden/gguf/llama-q8_0.gguf"));
  const std::string name = "model.layers.0.mlp.down_proj.weight";
  const TensorInfo info = *checkpoint.weights->Find(name);
  ASSERT_EQ(info.dtype, DType::kQ8_0);
  ASSERT_THAT(info.shape, ElementsAre(64, 96));
  const std::string whole = SliceBytes(MustRead(*checkpoint.weights, name, {0, 64}, {0, 96}));
  ASSERT_EQ(whole.size(), 64u * 3 * 34);
  for (int64_t begin = 0; begin < 96; begin += 5) {
    for (int64_t end = begin + 1; end <= 96; end += 7) {
      const TensorSlice slice = MustRead(*checkpoint.weights, name, {10, 20}, {begin, end});
      EXPECT_EQ(slice.rows.k_offset, begin % 32);
      EXPECT_EQ(slice.rows.k, end - begin);
      EXPECT_EQ(SliceBytes(slice), CutColumns(whole.substr(10 * 3 * 34, 10 * 3 * 34), 3 * 34,
                                              begin / 32 * 34, (end + 31) / 32 * 34));
    }
  }
}

TEST(WeightSource, VectorsAreWidened) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("gqa-a"), directory);
  const std::string file = ReadFile(directory.path() + "/model.safetensors");
  const Checkpoint checkpoint = MustOpen(directory.path());
  const std::vector<float> norm = MustReadVector(*checkpoint.weights, "model.norm.weight", {0, 64});
  ASSERT_EQ(norm.size(), 64u);
  EXPECT_NE(file.find(std::string(reinterpret_cast<const char*>(norm.data()), 256)),
            std::string::npos);
  const std::vector<float> part = MustReadVector(*checkpoint.weights, "model.norm.weight", {9, 12});
  EXPECT_EQ(part, std::vector<float>(norm.begin() + 9, norm.begin() + 12));
  EXPECT_THAT(MustReadVector(*checkpoint.weights, "model.norm.weight", {64, 64}), IsEmpty());
}

TEST(WeightSource, AsksThatMakeNoSense) {
  const Checkpoint checkpoint = MustOpen(GoldenPath("gqa-a"));
  WeightSource& weights = *checkpoint.weights;
  EXPECT_FALSE(weights.Has("model.layers.9.mlp.up_proj.weight"));
  EXPECT_EQ(weights.Read("nothing", {0, 1}, {0, 1}).status().code(), absl::StatusCode::kNotFound);
  for (const Range bad : {Range{-1, 4}, Range{5, 4}, Range{0, 97}, Range{97, 97}}) {
    EXPECT_FALSE(weights.Read(kUp, bad, {0, 1}).ok());
    EXPECT_FALSE(weights.Read(kUp, {0, 1}, bad).ok());
    EXPECT_FALSE(weights.ReadVector("model.norm.weight", bad).ok());
  }
  EXPECT_FALSE(weights.Read("model.norm.weight", {0, 1}, {0, 1}).ok());
  EXPECT_FALSE(weights.ReadVector(kUp, {0, 1}).ok());
  weights.Release("nothing");
}

// Every tensor is readable with aligned loads, whatever the length of the header.
TEST(WeightSource, MisalignedFilesAreCopied) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("gqa-a"), directory);
  const Checkpoint original = MustOpen(GoldenPath("gqa-a"));
  const std::string file = ReadFile(directory.path() + "/model.safetensors");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), 8);
  for (const size_t padding : {1, 2, 3}) {
    const std::string header = file.substr(8, header_bytes) + std::string(padding, ' ');
    directory.Write("model.safetensors", SafetensorsFile(header, file.substr(8 + header_bytes)));
    const Checkpoint shifted = MustOpen(directory.path());
    const TensorSlice slice = MustRead(*shifted.weights, kUp, {7, 90}, {3, 50});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slice.rows.data) % 4, 0u);
    EXPECT_EQ(SliceBytes(slice), SliceBytes(MustRead(*original.weights, kUp, {7, 90}, {3, 50})));
    EXPECT_EQ(MustReadVector(*shifted.weights, "model.norm.weight", {1, 64}),
              MustReadVector(*original.weights, "model.norm.weight", {1, 64}));
  }
}

int64_t ResidentFileBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size, resident, shared;
  statm >> size >> resident >> shared;
  return shared * sysconf(_SC_PAGESIZE);
}

TEST(WeightSource, OnlyWhatIsReadIsResident) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("tied"), directory);
  json config = ReadConfig(directory);
  config.update({{"num_hidden_layers", 1}, {"vocab_size", 131072}, {"hidden_size", 512}});
  directory.Write("config.json", config.dump());
  // 128 MiB of embedding, a hole in the file; the layer's own weights are small.
  json header;
  int64_t end = 0;
  const auto spec = ParseModelConfig(config.dump(), "config.json");
  ASSERT_TRUE(spec.ok()) << spec.status();
  for (const ExpectedTensor& tensor : ExpectedTensors(*spec)) {
    int64_t bytes = 2;
    for (const int64_t dimension : tensor.shape) bytes *= dimension;
    header[tensor.name] = {
        {"dtype", "BF16"}, {"shape", tensor.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  const std::string start = SafetensorsFile(header.dump() + "   ", "");
  const std::string path = directory.Write("model.safetensors", start);
  std::filesystem::resize_file(path, start.size() + end);

  const Checkpoint checkpoint = MustOpen(directory.path());
  const std::string name = "model.embed_tokens.weight";
  const int64_t before = ResidentFileBytes();
  const int64_t quarter = 131072 / 4;
  const TensorSlice slice = MustRead(*checkpoint.weights, name, {quarter, 2 * quarter}, {0, 512});
  EXPECT_EQ(SliceBytes(slice), std::string(32 * kMiB, '\0'));
  EXPECT_GE(ResidentFileBytes() - before, 31 * kMiB);
  EXPECT_LE(ResidentFileBytes() - before, 40 * kMiB);
  checkpoint.weights->Release(name);
  EXPECT_LE(ResidentFileBytes() - before, 4 * kMiB);
  EXPECT_EQ(SliceBytes(slice), std::string(32 * kMiB, '\0'));  // still valid, read again
}

std::vector<float> Widen(const TensorSlice& slice) {
  const std::string bytes = SliceBytes(slice);
  std::vector<float> values;
  for (size_t i = 0; i < bytes.size(); i += 2) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + i, 2);
    values.push_back(BFloat16ToFloat(bits));
  }
  return values;
}

TEST(Dummy, NeedsOnlyAConfig) {
  TemporaryDirectory directory;
  const std::string config =
      directory.Write("config.json", ReadFile(GoldenPath("tied") + "/config.json"));
  const Checkpoint by_file = MustOpen(config, LoadFormat::kDummy, 7);
  const Checkpoint by_directory = MustOpen(directory.path(), LoadFormat::kDummy, 7);
  EXPECT_EQ(by_file.tokenizer_directory, directory.path());
  EXPECT_EQ(by_file.weights->Find(kUp)->dtype, DType::kBFloat16);
  EXPECT_EQ(SliceBytes(MustRead(*by_file.weights, kUp, {0, 96}, {0, 64})),
            SliceBytes(MustRead(*by_directory.weights, kUp, {0, 96}, {0, 64})));
  EXPECT_EQ(
      OpenCheckpoint(directory.path() + "/nothing.json", LoadFormat::kDummy, 7).status().code(),
      absl::StatusCode::kNotFound);
}

TEST(Dummy, SlicesArePartsOfTheWhole) {
  const Checkpoint checkpoint = MustOpen(GoldenPath("tied"), LoadFormat::kDummy, 7);
  WeightSource& weights = *checkpoint.weights;
  const std::string whole = SliceBytes(MustRead(weights, kUp, {0, 96}, {0, 64}));
  for (const int64_t ranks : {2, 3, 5, 8, 97}) {
    std::string rows;
    for (int part = 0; part < ranks; ++part) {
      const Range range = SplitEvenly(96, static_cast<int>(ranks), part);
      rows += SliceBytes(MustRead(weights, kUp, range, {0, 64}));
      const Range cols = SplitEvenly(64, static_cast<int>(ranks), part);
      EXPECT_EQ(SliceBytes(MustRead(weights, kUp, {0, 96}, cols)),
                CutColumns(whole, 128, cols.begin * 2, cols.end * 2));
    }
    EXPECT_EQ(rows, whole);
  }
  const std::vector<float> norm = MustReadVector(weights, "model.norm.weight", {0, 64});
  EXPECT_EQ(MustReadVector(weights, "model.norm.weight", {5, 9}),
            std::vector<float>(norm.begin() + 5, norm.begin() + 9));
}

TEST(Dummy, SeedAndNameChangeEverything) {
  const auto up = [](uint64_t seed, const char* name) {
    const Checkpoint checkpoint = MustOpen(GoldenPath("tied"), LoadFormat::kDummy, seed);
    return SliceBytes(MustRead(*checkpoint.weights, name, {0, 96}, {0, 64}));
  };
  EXPECT_EQ(up(1, kUp), up(1, kUp));
  EXPECT_NE(up(1, kUp), up(2, kUp));
  EXPECT_NE(up(1, kUp), up(1, "model.layers.0.mlp.up_proj.weight"));
  EXPECT_NE(up(1, kUp), up(1, "model.layers.1.mlp.gate_proj.weight"));
}

TEST(Dummy, ValuesKeepActivationsSane) {
  const Checkpoint checkpoint = MustOpen(GoldenPath("qw2"), LoadFormat::kDummy, 3);
  for (const TensorInfo& info : checkpoint.weights->tensors()) {
    SCOPED_TRACE(info.name);
    const Range rows = {0, info.shape[0]};
    if (info.shape.size() == 1) {
      const float center = absl::StrContains(info.name, "bias") ? 0.0f : 1.0f;
      for (const float value : MustReadVector(*checkpoint.weights, info.name, rows)) {
        EXPECT_NEAR(value, center, 0.1);
      }
      continue;
    }
    const std::vector<float> values =
        Widen(MustRead(*checkpoint.weights, info.name, rows, {0, info.shape[1]}));
    double sum = 0, squares = 0;
    for (const float value : values) {
      sum += value;
      squares += static_cast<double>(value) * value;
    }
    const double n = static_cast<double>(values.size());
    double expected = 1.0 / static_cast<double>(info.shape[1]);
    if (absl::StrContains(info.name, "o_proj") || absl::StrContains(info.name, "down_proj")) {
      expected /= 4.0;  // two layers
    }
    EXPECT_NEAR(squares / n / expected, 1.0, 0.15);
    EXPECT_LT(std::abs(sum / n), 5.0 * std::sqrt(expected / n));
  }
}

}  // namespace
}  // namespace heddle
