#include "runtime/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/runtime/checkpoint/files.h"
#include "tests/runtime/model/prompt_runner.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using Logits = std::vector<std::vector<float>>;

Prompts PromptsOf(const GoldenModel& model) {
  Prompts prompts;
  for (const GoldenPrompt& prompt : model.prompts) prompts.push_back(prompt.token_ids);
  return prompts;
}

Logits LogitsOf(const std::string& path, const Prompts& prompts, const RunOptions& options) {
  absl::StatusOr<Logits> logits = PromptLogits(path, prompts, options);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return logits.ok() ? *std::move(logits) : Logits();
}

// The share of the logits' range that transformers' and ours may differ by.
void ExpectGolden(const GoldenModel& model, RunOptions options, double tolerance) {
  options.max_model_len = model.max_model_len;
  const Logits logits = LogitsOf(model.path, PromptsOf(model), options);
  ASSERT_EQ(logits.size(), model.prompts.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    EXPECT_LE(LogitsDifference(model.prompts[i].logits, logits[i]), tolerance)
        << model.path << " on " << options.num_ranks << " ranks, prompt " << model.prompts[i].id;
  }
}

GoldenModel Golden(absl::string_view name) {
  absl::StatusOr<GoldenModel> model = LoadGoldenModel(name);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

class EveryModel : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Golden, EveryModel, testing::ValuesIn(GoldenLlamaModelNames()),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(EveryModel, GivesTransformersLogitsOnAnyNumberOfRanks) {
  const GoldenModel model = Golden(GetParam());
  for (const int num_ranks : {1, 2, 3, 4, 5, 8}) {
    ExpectGolden(model, {.num_ranks = num_ranks, .page_size = 3, .chunk = 7}, 1e-5);
  }
}

TEST_P(EveryModel, GivesThemWithoutACache) {
  const GoldenModel model = Golden(GetParam());
  for (const int num_ranks : {1, 3}) {
    ExpectGolden(model, {.num_ranks = num_ranks, .use_cache = false}, 1e-5);
  }
}

TEST_P(EveryModel, GivesThemWhenOpsRunLate) {
  const GoldenModel model = Golden(GetParam());
  for (const int num_ranks : {1, 2}) {
    ExpectGolden(
        model, {.num_ranks = num_ranks, .stream_mode = CpuStreamMode::kDeferred, .chunk = 5}, 1e-5);
  }
}

class EveryGguf : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Golden, EveryGguf, testing::ValuesIn(GoldenGgufNames()),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(EveryGguf, GivesTransformersLogitsOnAnyNumberOfRanks) {
  absl::StatusOr<GoldenModel> model = LoadGoldenGguf(GetParam());
  ASSERT_TRUE(model.ok()) << model.status();
  for (const int num_ranks : {1, 2, 3, 5}) {
    ExpectGolden(*model, {.num_ranks = num_ranks, .chunk = 9}, 1e-5);
  }
}

// Sums over ranks round differently, and that may tip the rounding of an int8: rank counts differ
// by what int8 costs, not more.
TEST_P(EveryGguf, StaysNearWithInt8Activations) {
  absl::StatusOr<GoldenModel> model = LoadGoldenGguf(GetParam());
  ASSERT_TRUE(model.ok()) << model.status();
  RunOptions options = {.max_model_len = model->max_model_len,
                        .precision = ActivationPrecision::kInt8};
  ExpectGolden(*model, options, 5e-2);
  const Logits one = LogitsOf(model->path, PromptsOf(*model), options);
  for (const int num_ranks : {2, 3}) {
    options.num_ranks = num_ranks;
    const Logits many = LogitsOf(model->path, PromptsOf(*model), options);
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_LE(LogitsDifference(one[i], many[i]), 3e-2) << num_ranks;
    }
  }
}

// Longer than two attention chunks, and not a multiple of anything.
Prompts LongPrompts() {
  std::mt19937 random(5);
  Prompts prompts;
  for (const size_t size : {117, 1, 64, 65, 17}) {
    std::vector<int32_t>& prompt = prompts.emplace_back(size);
    for (int32_t& id : prompt) id = random() % 259;
  }
  return prompts;
}

// A row's bits depend on its own sequence alone: not on batch mates, chunks, pages or threads.
TEST(DecoderBits, AreThoseOfOneSequenceAlone) {
  const std::string path = Golden("gqa-a").path;
  const Prompts prompts = LongPrompts();
  for (const int num_ranks : {1, 3}) {
    const Logits expected =
        LogitsOf(path, prompts, {.num_ranks = num_ranks, .one_at_a_time = true});
    for (const int64_t chunk : {1, 7, 64, 1 << 20}) {
      EXPECT_EQ(LogitsOf(path, prompts, {.num_ranks = num_ranks, .chunk = chunk}), expected)
          << chunk;
    }
    for (const int64_t page_size : {1, 3, 64, 128}) {
      EXPECT_EQ(
          LogitsOf(path, prompts, {.num_ranks = num_ranks, .page_size = page_size, .chunk = 50}),
          expected)
          << page_size;
    }
    EXPECT_EQ(LogitsOf(path, prompts, {.num_ranks = num_ranks, .num_threads = 3}), expected);
    EXPECT_EQ(
        LogitsOf(path, prompts,
                 {.num_ranks = num_ranks, .stream_mode = CpuStreamMode::kDeferred, .chunk = 11}),
        expected);
  }
}

// Whatever differs between steps of one shape is read from device memory, so a recorded step serves
// all positions, pages and token ids.
TEST(DecoderBits, AreThoseOfARecordedStep) {
  const std::string path = Golden("gqa-a").path;
  const Prompts prompts = LongPrompts();
  for (const int num_ranks : {1, 2}) {
    for (const CpuStreamMode mode : {CpuStreamMode::kImmediate, CpuStreamMode::kDeferred}) {
      RunOptions options = {
          .num_ranks = num_ranks, .stream_mode = mode, .chunk = 1, .one_at_a_time = true};
      const Logits expected = LogitsOf(path, prompts, options);
      options.replay = true;
      EXPECT_EQ(LogitsOf(path, prompts, options), expected);
    }
  }
}

TEST(Decoder, OverRanksLogitsDifferByRoundingAlone) {
  const std::string path = Golden("gqa-odd").path;
  const Prompts prompts = LongPrompts();
  const Logits one = LogitsOf(path, prompts, {});
  for (const int num_ranks : {2, 3, 4, 5, 7, 8, 11}) {
    const Logits many = LogitsOf(path, prompts, {.num_ranks = num_ranks});
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_LE(LogitsDifference(one[i], many[i]), 1e-5) << num_ranks;
    }
  }
}

// Special tokens sit at the end of the vocabulary, where a floor-divided shard would lose them.
TEST(Decoder, TheLastIdsOfAnOddVocabularyAreEmbedded) {
  const std::string path = Golden("gqa-a").path;
  const Prompts prompts = {{256, 257, 258, 0, 258}};
  const Logits one = LogitsOf(path, prompts, {});
  for (const int num_ranks : {2, 4, 8}) {
    const Logits many = LogitsOf(path, prompts, {.num_ranks = num_ranks});
    ASSERT_EQ(many.size(), 1u);
    EXPECT_LE(LogitsDifference(one[0], many[0]), 1e-5) << num_ranks;
  }
}

TEST(Decoder, NarrowWeightsAndPagesStayNear) {
  const GoldenModel model = Golden("gqa-a");
  ExpectGolden(model, {.num_ranks = 2, .weight_dtype = DType::kBFloat16}, 2e-2);
  ExpectGolden(model, {.num_ranks = 2, .weight_dtype = DType::kFloat16}, 2e-3);
  ExpectGolden(model, {.num_ranks = 2, .kv_cache_dtype = DType::kBFloat16}, 2e-2);
  ExpectGolden(model, {.num_ranks = 2, .kv_cache_dtype = DType::kFloat16}, 2e-3);
}

// A layer whose output float16 could not hold: weights kept as float16 are no reason to compute in
// it.
TEST(Decoder, LargeActivationsStayFiniteWhateverTheWeightsAreKeptAs) {
  const TemporaryDirectory directory;
  CopyDirectory(Golden("gqa-a").path, directory);
  std::string file = ReadFile(directory.path() + "/model.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  const auto header = nlohmann::json::parse(file.substr(8, header_bytes));
  const auto [begin, end] = header["model.layers.0.mlp.down_proj.weight"]["data_offsets"]
                                .get<std::pair<size_t, size_t>>();
  for (size_t at = 8 + header_bytes + begin; at < 8 + header_bytes + end; at += sizeof(float)) {
    float weight = 0;
    std::memcpy(&weight, &file[at], sizeof(weight));
    weight *= 1 << 16;
    std::memcpy(&file[at], &weight, sizeof(weight));
  }
  directory.Write("model.safetensors", file);

  float largest = 0;
  RunOptions options = {.num_ranks = 2};
  options.tap = [&](absl::string_view name, ConstMatrixView value) {
    if (name != "layers.0.out") return absl::OkStatus();
    for (int64_t row = 0; row < value.rows; ++row) {
      for (int64_t col = 0; col < value.cols; ++col) {
        largest = std::max(largest, std::abs(value.Row<float>(row)[col]));
      }
    }
    return absl::OkStatus();
  };
  const Prompts prompts = LongPrompts();
  const Logits expected = LogitsOf(directory.path(), prompts, options);
  EXPECT_GT(largest, 1e5f);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Logits logits =
        LogitsOf(directory.path(), prompts,
                 {.num_ranks = 2, .weight_dtype = dtype, .kv_cache_dtype = dtype});
    ASSERT_EQ(logits.size(), expected.size());
    for (size_t i = 0; i < logits.size(); ++i) {
      EXPECT_LE(LogitsDifference(expected[i], logits[i]), 5e-2) << DTypeName(dtype);
    }
  }
}

TEST(Decoder, DummyWeightsGiveTheSameModelAtAnyNumberOfRanks) {
  const std::string path = Golden("gqa-a").path + "/config.json";
  const Prompts prompts = LongPrompts();
  const Logits one = LogitsOf(path, prompts, {.load_format = LoadFormat::kDummy});
  const Logits three = LogitsOf(path, prompts, {.num_ranks = 3, .load_format = LoadFormat::kDummy});
  ASSERT_EQ(one.size(), three.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_LE(LogitsDifference(one[i], three[i]), 1e-5);
}

TEST(Decoder, ReportsProgressAndActivationsLayerByLayer) {
  const std::string path = Golden("gqa-a").path;
  int num_layers = 0;
  std::set<std::string> names;
  RunOptions options = {.num_ranks = 2};
  options.on_layer = [&] { ++num_layers; };
  options.tap = [&](absl::string_view name, ConstMatrixView value) {
    names.insert(std::string(name));
    EXPECT_EQ(value.rows, 3);
    for (int64_t i = 0; i < value.rows * value.cols; ++i) {
      EXPECT_TRUE(std::isfinite(static_cast<const float*>(value.data)[i])) << name;
    }
    return absl::OkStatus();
  };
  LogitsOf(path, {{1, 2, 3}}, options);
  EXPECT_EQ(num_layers, 2);
  EXPECT_THAT(names, testing::IsSupersetOf({"layers.0.queries", "layers.0.attended",
                                            "layers.1.keys", "layers.1.out"}));
}

}  // namespace
}  // namespace heddle
