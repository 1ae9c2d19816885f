#include "runtime/checkpoint/checkpoint.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/runtime/checkpoint/files.h"
#include "tests/runtime/checkpoint/open.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kUp[] = "model.layers.1.mlp.up_proj.weight";

std::string Error(const std::string& path, LoadFormat format = LoadFormat::kAuto) {
  const auto checkpoint = OpenCheckpoint(path, format, 0);
  EXPECT_FALSE(checkpoint.ok());
  return checkpoint.ok() ? "" : std::string(checkpoint.status().message());
}

json ReadConfig(const TemporaryDirectory& directory) {
  return json::parse(ReadFile(directory.path() + "/config.json"));
}

TEST(Checkpoint, OpensEveryGoldenModel) {
  const std::vector<std::string> names = GoldenModelNames();
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const auto golden = LoadGoldenModel(name);
    ASSERT_TRUE(golden.ok()) << golden.status();
    const Checkpoint checkpoint = MustOpen(golden->path);
    ASSERT_NE(checkpoint.weights, nullptr);
    EXPECT_EQ(checkpoint.spec.vocab_size, golden->vocab_size);
    EXPECT_EQ(checkpoint.tokenizer_directory, golden->path);
    EXPECT_THAT(checkpoint.generation.eos_token_ids, ElementsAre(2));
    const auto frequencies = InverseFrequencies(checkpoint.spec.rope, golden->max_model_len);
    ASSERT_EQ(frequencies.size(), golden->rope_inv_freq.size());
    for (size_t i = 0; i < frequencies.size(); ++i) {
      EXPECT_NEAR(frequencies[i] / golden->rope_inv_freq[i], 1.0, 2e-6) << i;
    }
    EXPECT_NEAR(AttentionFactor(checkpoint.spec.rope), golden->rope_attention_scaling, 1e-7);

    const std::vector<ExpectedTensor> expected = ExpectedTensors(checkpoint.spec);
    ASSERT_EQ(checkpoint.weights->tensors().size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(checkpoint.weights->tensors()[i].name, expected[i].name);
      EXPECT_EQ(checkpoint.weights->tensors()[i].shape, expected[i].shape);
      const bool always_float32 = absl::EndsWith(expected[i].name, "e_score_correction_bias");
      const DType dtype = checkpoint.weights->tensors()[i].dtype;
      if (checkpoint.spec.block_fp8.has_value() && dtype == DType::kFloat8E4M3) continue;
      EXPECT_EQ(dtype, always_float32 ? DType::kFloat32 : checkpoint.spec.stored_dtype);
    }
  }
}

TEST(Checkpoint, ShardsHoldTheSameModelAsOneFile) {
  const Checkpoint one = MustOpen(GoldenPath("mqa"));
  const Checkpoint two = MustOpen(GoldenPath("mqa-two-shards"));
  for (const TensorInfo& info : one.weights->tensors()) {
    SCOPED_TRACE(info.name);
    const Range rows = {0, info.shape[0]};
    if (info.shape.size() == 1) {
      EXPECT_EQ(MustReadVector(*one.weights, info.name, rows),
                MustReadVector(*two.weights, info.name, rows));
    } else {
      const Range cols = {0, info.shape[1]};
      EXPECT_EQ(SliceBytes(MustRead(*one.weights, info.name, rows, cols)),
                SliceBytes(MustRead(*two.weights, info.name, rows, cols)));
    }
  }
}

TEST(HuggingFace, ListsMissingShardsBeforeReading) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("mqa-two-shards"), directory);
  std::filesystem::remove(directory.path() + "/model-00002-of-00002.safetensors");
  directory.Write("model-00001-of-00002.safetensors", "no safetensors, but nobody looks");
  const std::string error = Error(directory.path());
  EXPECT_THAT(error, AllOf(HasSubstr("model-00002-of-00002.safetensors"), HasSubstr("1 of the 2"),
                           HasSubstr("interrupted")));
  EXPECT_THAT(error, Not(HasSubstr("00001-of")));
}

TEST(HuggingFace, EveryBadShardIsNamed) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("mqa-two-shards"), directory);
  directory.Write("model-00001-of-00002.safetensors", "");
  directory.Write("model-00002-of-00002.safetensors",
                  "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(Error(directory.path()),
              AllOf(HasSubstr("2 problems"), HasSubstr("00001-of-00002.safetensors: not a"),
                    HasSubstr("file is empty"), HasSubstr("00002-of-00002.safetensors: not a"),
                    HasSubstr("Git LFS")));
}

TEST(HuggingFace, StrayFilesAreIgnored) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("mqa-two-shards"), directory);
  directory.Write("model.safetensors", "stray");
  directory.Write("consolidated.safetensors", "stray");
  directory.Write("model-00003-of-00002.safetensors", "stray");
  MustOpen(directory.path());
}

TEST(HuggingFace, TheIndexIsTheOnlyAuthority) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("mqa-two-shards"), directory);
  const std::string index_name = "model.safetensors.index.json";
  const json index = json::parse(ReadFile(directory.path() + "/" + index_name));
  const auto error_with = [&](const json& changes) {
    json changed = index;
    changed["weight_map"].update(changes);
    directory.Write(index_name, changed.dump());
    return Error(directory.path());
  };
  const std::string first = "model-00001-of-00002.safetensors";
  const std::string second = "model-00002-of-00002.safetensors";
  const std::string name = "model.embed_tokens.weight";
  const std::string other = index["weight_map"][name] == first ? second : first;
  EXPECT_THAT(error_with({{name, other}}),
              AllOf(HasSubstr("tensor " + name + " is not in " + other), HasSubstr("places it")));
  EXPECT_THAT(error_with({{"no.such.tensor", first}}), HasSubstr("no.such.tensor is not in"));
  for (const char* bad : {"../model.safetensors", "/etc/passwd", "", ".", "..", "a/b"}) {
    EXPECT_THAT(error_with({{name, bad}}),
                AllOf(HasSubstr("weight_map." + name), HasSubstr("not the name of a file")));
  }
  EXPECT_THAT(error_with({{name, 3}}), HasSubstr("not the name of a file"));
  EXPECT_THAT(error_with({{name, first + std::string("\0x", 2)}}),
              HasSubstr("not the name of a file"));

  // A tensor of a shard that the index leaves out is not there.
  json shorter = index;
  shorter["weight_map"].erase(name);
  directory.Write(index_name, shorter.dump());
  EXPECT_THAT(Error(directory.path()), HasSubstr("missing tensor " + name + " [259, 32]"));

  for (const char* text : {"{}", "[]", "{\"weight_map\": []}", "{\"weight_map\": null}"}) {
    directory.Write(index_name, text);
    EXPECT_THAT(Error(directory.path()), HasSubstr("weight_map is not an object"));
  }
  directory.Write(index_name, "{\"weight_map\": {}}");
  EXPECT_THAT(Error(directory.path()), HasSubstr("missing tensor model.embed_tokens.weight"));
  directory.Write(index_name, "{\"weight_map\": {\"a\": \"b\", \"a\": \"b\"}}");
  EXPECT_THAT(Error(directory.path()), HasSubstr("the key \"a\" twice"));
  directory.Write(index_name, "");
  EXPECT_THAT(Error(directory.path()), HasSubstr("file is empty"));
}

TEST(HuggingFace, DirectoriesThatAreNoModel) {
  TemporaryDirectory directory;
  EXPECT_THAT(Error(directory.path() + "/nowhere"), HasSubstr("there is no model at"));
  EXPECT_THAT(Error(directory.path()), HasSubstr("has no config.json"));
  directory.Write("a.gguf", "GGUF");
  EXPECT_THAT(Error(directory.path()), HasSubstr("give its own path: a.gguf"));
  directory.Write("config.json", ReadFile(GoldenPath("gqa-a") + "/config.json"));
  EXPECT_THAT(Error(directory.path()),
              AllOf(HasSubstr("neither model.safetensors nor"), HasSubstr("dummy")));
  directory.Write("pytorch_model.bin", "PK");
  EXPECT_THAT(Error(directory.path()), HasSubstr("convert its pytorch_model.bin"));
  const std::string file = directory.Write("model.safetensors", "");
  EXPECT_THAT(Error(directory.path()), HasSubstr("file is empty"));
  EXPECT_THAT(Error(file, LoadFormat::kSafetensors), HasSubstr("is a file; give the directory"));
  EXPECT_THAT(Error(file), HasSubstr("not a GGUF file"));
  EXPECT_THAT(Error(directory.path(), LoadFormat::kGguf), HasSubstr("not a regular file"));
}

TEST(HuggingFace, CutOffFilesNameTheirTensors) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("gqa-a"), directory);
  const std::string file = ReadFile(directory.path() + "/model.safetensors");
  directory.Write("model.safetensors", file.substr(0, file.size() - 5));
  EXPECT_THAT(Error(directory.path()),
              AllOf(HasSubstr("model.safetensors: cut off"),
                    HasSubstr(absl::StrCat("expected ", file.size(), " bytes")),
                    HasSubstr(absl::StrCat("found ", file.size() - 5)), HasSubstr("weight")));
  directory.Write("model.safetensors", file + "x");
  EXPECT_THAT(Error(directory.path()), HasSubstr("1 trailing bytes"));
}

TEST(Tensors, TiedAndUntiedHeads) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("tied"), directory);
  EXPECT_FALSE(MustOpen(directory.path()).weights->Has("lm_head.weight"));
  json config = ReadConfig(directory);
  config["tie_word_embeddings"] = false;
  directory.Write("config.json", config.dump());
  EXPECT_THAT(Error(directory.path()),
              AllOf(HasSubstr("lm_head.weight"), HasSubstr("tie_word_embeddings is false")));

  // A head beside tied embeddings is left alone.
  TemporaryDirectory untied;
  CopyDirectory(GoldenPath("gqa-a"), untied);
  EXPECT_TRUE(MustOpen(untied.path()).weights->Has("lm_head.weight"));
  config = ReadConfig(untied);
  config["tie_word_embeddings"] = true;
  untied.Write("config.json", config.dump());
  EXPECT_FALSE(MustOpen(untied.path()).weights->Has("lm_head.weight"));
}

// Rewrites the header of a copy of `model`; `change` edits the parsed JSON.
template <typename Change>
void EditHeader(const TemporaryDirectory& directory, Change change, absl::string_view data = "") {
  const std::string file = ReadFile(directory.path() + "/model.safetensors");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), 8);
  json header = json::parse(file.substr(8, header_bytes));
  change(header);
  directory.Write(
      "model.safetensors",
      SafetensorsFile(header.dump(), absl::StrCat(file.substr(8 + header_bytes), data)));
}

TEST(Tensors, EveryProblemIsListed) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("gqa-a"), directory);
  EditHeader(directory, [](json& header) {
    header["model.layers.0.mlp.up_proj.weight_scale"] = header["model.layers.0.mlp.up_proj.weight"];
    header.erase("model.layers.0.mlp.up_proj.weight");
    header[kUp]["shape"] = {64, 96};
    header["lm_head.weight"]["dtype"] = "I32";
    header["model.norm.weight"]["shape"] = {8, 8};
  });
  EXPECT_THAT(Error(directory.path()),
              AllOf(HasSubstr("has 5 problems"),
                    HasSubstr("missing tensor model.layers.0.mlp.up_proj.weight [96, 64]"),
                    HasSubstr(absl::StrCat("tensor ", kUp, " is [64, 96], expected [96, 64]")),
                    HasSubstr("tensor lm_head.weight is stored as I32, which is not supported"),
                    HasSubstr("tensor model.norm.weight is [8, 8], expected [64]"),
                    HasSubstr("unknown tensor model.layers.0.mlp.up_proj.weight_scale")));
}

TEST(Tensors, ShapesFollowTheConfig) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("gqa-a"), directory);
  json config = ReadConfig(directory);
  config["num_key_value_heads"] = 4;
  directory.Write("config.json", config.dump());
  EXPECT_THAT(Error(directory.path()),
              AllOf(HasSubstr("has 4 problems"),
                    HasSubstr("model.layers.0.self_attn.k_proj.weight is [16, 64], expected "
                              "[32, 64]"),
                    HasSubstr("model.layers.1.self_attn.v_proj.weight")));
  // A whole layer too few on disk.
  config["num_key_value_heads"] = 2;
  config["num_hidden_layers"] = 3;
  directory.Write("config.json", config.dump());
  EXPECT_THAT(Error(directory.path()), HasSubstr("has 9 problems"));
}

TEST(Tensors, IgnorableAndEmptyTensorsAreNoFault) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("gqa-a"), directory);
  json config = ReadConfig(directory);
  config["num_hidden_layers"] = 1;  // leaves the second layer to multi-token prediction
  directory.Write("config.json", config.dump());
  const std::string file = ReadFile(directory.path() + "/model.safetensors");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), 8);
  const size_t end = file.size() - 8 - header_bytes;
  EditHeader(
      directory,
      [&](json& header) {
        header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
            {"dtype", "F64"}, {"shape", {1}}, {"data_offsets", {end, end + 8}}};
        header["something.empty"] = {{"dtype", "I8"}, {"shape", {0, 7}}, {"data_offsets", {0, 0}}};
      },
      std::string(8, '\0'));
  EXPECT_EQ(MustOpen(directory.path()).weights->tensors().size(),
            ExpectedTensors(MustOpen(directory.path()).spec).size());
}

TEST(Checkpoint, AGgufFileWithoutATokenizerLeavesItToItsDirectory) {
  const absl::StatusOr<GoldenModel> golden = LoadGoldenGguf("qwen2-q8_0");
  ASSERT_TRUE(golden.ok()) << golden.status();
  const Checkpoint checkpoint = MustOpen(golden->path);
  EXPECT_FALSE(checkpoint.gguf_vocabulary.has_value());
  EXPECT_EQ(checkpoint.tokenizer_directory, absl::StrCat(HEDDLE_TESTS_DIR, "/golden/gguf"));
}

TEST(Tensors, OfAGgufFile) {
  const std::string file = ReadFile(absl::StrCat(HEDDLE_TESTS_DIR, "/golden/gguf/qwen2-q8_0.gguf"));
  TemporaryDirectory directory;
  // Names are of equal length, so that nothing moves.
  const std::string renamed = directory.Write(
      "renamed.gguf", absl::StrReplaceAll(file, {{"blk.1.ffn_up.weight", "blk.1.fnn_up.weight"},
                                                 {"blk.0.attn_q.bias", "blk.0.attn_Q.bias"}}));
  EXPECT_THAT(Error(renamed),
              AllOf(HasSubstr("has 4 problems"),
                    HasSubstr("missing tensor model.layers.1.mlp.up_proj.weight [96, 64]"),
                    HasSubstr("missing tensor model.layers.0.self_attn.q_proj.bias [64]"),
                    HasSubstr("unknown tensor model.layers.1.fnn_up.weight"),
                    HasSubstr("unknown tensor model.layers.0.attn_Q.bias")));
}

TEST(GenerationDefaults, OverrideTheConfig) {
  TemporaryDirectory directory;
  CopyDirectory(GoldenPath("tied"), directory);
  directory.Write("generation_config.json", R"({"eos_token_id": [5, 6], "temperature": 0.5})");
  const Checkpoint checkpoint = MustOpen(directory.path());
  EXPECT_THAT(checkpoint.generation.eos_token_ids, ElementsAre(5, 6));
  EXPECT_EQ(checkpoint.generation.temperature, 0.5);
  EXPECT_THAT(checkpoint.spec.eos_token_ids, ElementsAre(2));
  directory.Write("generation_config.json", "{}");
  EXPECT_THAT(MustOpen(directory.path()).generation.eos_token_ids, ElementsAre(2));
  directory.Write("generation_config.json", R"({"top_p": "high"})");
  EXPECT_THAT(Error(directory.path()),
              AllOf(HasSubstr("generation_config.json"), HasSubstr("top_p")));
}

TEST(LoadFormat, Names) {
  EXPECT_EQ(*ParseLoadFormat("auto"), LoadFormat::kAuto);
  EXPECT_EQ(*ParseLoadFormat("safetensors"), LoadFormat::kSafetensors);
  EXPECT_EQ(*ParseLoadFormat("gguf"), LoadFormat::kGguf);
  EXPECT_EQ(*ParseLoadFormat("dummy"), LoadFormat::kDummy);
  EXPECT_THAT(std::string(ParseLoadFormat("pt").status().message()), HasSubstr("\"pt\""));
}

TEST(SmolLm2, OpensTheRealFile) {
  const char* path = std::getenv("HEDDLE_SMOLLM2");
  if (path == nullptr) GTEST_SKIP() << "HEDDLE_SMOLLM2 is not set to the path of its GGUF file";
  const Checkpoint checkpoint = MustOpen(path);
  ASSERT_NE(checkpoint.weights, nullptr);
  const ModelSpec& spec = checkpoint.spec;
  EXPECT_EQ(spec.model_type, "llama");
  EXPECT_EQ(spec.vocab_size, 49152);
  EXPECT_EQ(spec.hidden_size, 576);
  EXPECT_EQ(spec.intermediate_size, 1536);
  EXPECT_EQ(spec.num_layers, 30);
  EXPECT_EQ(spec.total_query_heads, 9);
  EXPECT_EQ(spec.total_kv_heads, 3);
  EXPECT_EQ(spec.head_dim, 64);
  EXPECT_EQ(spec.max_position_embeddings, 8192);
  EXPECT_EQ(spec.rope.theta, 100000.0);
  EXPECT_TRUE(spec.rope.interleaved);
  EXPECT_TRUE(spec.tie_word_embeddings);
  EXPECT_EQ(spec.stored_dtype, DType::kQ4_1);
  EXPECT_THAT(spec.windows, Each(0));
  EXPECT_THAT(checkpoint.generation.eos_token_ids, ElementsAre(2));
  EXPECT_EQ(spec.bos_token_id, 1);
  ASSERT_TRUE(checkpoint.gguf_vocabulary.has_value());
  EXPECT_EQ(checkpoint.gguf_vocabulary->pre, "smollm");
  EXPECT_EQ(checkpoint.gguf_vocabulary->tokens.size(), 49152u);
  EXPECT_EQ(checkpoint.gguf_vocabulary->merges.size(), 48900u);
  EXPECT_EQ(checkpoint.gguf_vocabulary->tokens[2], "<|im_end|>");

  WeightSource& weights = *checkpoint.weights;
  ASSERT_EQ(weights.tensors().size(), 272u);
  EXPECT_EQ(weights.Find("model.embed_tokens.weight")->dtype, DType::kQ8_0);
  for (const TensorInfo& info : weights.tensors()) {
    SCOPED_TRACE(info.name);
    if (info.shape.size() == 1) {
      // Norm weights: positive on the whole, none astray.
      double sum = 0;
      for (const float value : MustReadVector(weights, info.name, {0, info.shape[0]})) {
        ASSERT_TRUE(std::isfinite(value) && std::abs(value) < 100) << value;
        sum += value;
      }
      EXPECT_GT(sum, 0);
      continue;
    }
    // Scales and minima of the blocks, the first two or four bytes of each.
    const TensorSlice slice = MustRead(weights, info.name, {0, info.shape[0]}, {0, info.shape[1]});
    const std::string bytes = SliceBytes(slice);
    const int64_t block_bytes = BlockBytes(info.dtype);
    double largest = 0;
    for (size_t at = 0; at < bytes.size(); at += block_bytes) {
      uint16_t scale;
      std::memcpy(&scale, bytes.data() + at, 2);
      ASSERT_TRUE(std::isfinite(Float16ToFloat(scale)));
      largest = std::max<double>(largest, std::abs(Float16ToFloat(scale)));
    }
    EXPECT_GT(largest, 0);
    EXPECT_LT(largest, 10);
    weights.Release(info.name);
  }
}

}  // namespace
}  // namespace heddle
