#include "runtime/checkpoint/gguf_model.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/checkpoint/checkpoint.h"
#include "tests/runtime/checkpoint/files.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Metadata of a model with 4 query heads of 8, without tensors.
GgufBuilder Metadata(const std::string& arch) {
  GgufBuilder builder;
  builder.String("general.architecture", arch)
      .Uint32(arch + ".embedding_length", 32)
      .Uint32(arch + ".feed_forward_length", 64)
      .Uint32(arch + ".block_count", 3)
      .Uint32(arch + ".attention.head_count", 4)
      .Uint32(arch + ".attention.head_count_kv", 2)
      .Uint32(arch + ".context_length", 128)
      .Uint32(arch + ".vocab_size", 97)
      .Float32(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
  return builder;
}

absl::StatusOr<ModelSpec> Parse(const GgufBuilder& builder) {
  const std::string contents = builder.Build();
  const auto file = ParseGguf(contents, "m.gguf");
  EXPECT_TRUE(file.ok()) << file.status();
  return GgufModelSpec(*file, contents, "m.gguf");
}

ModelSpec Spec(const GgufBuilder& builder) {
  const auto spec = Parse(builder);
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : ModelSpec();
}

std::string Error(const GgufBuilder& builder) {
  const auto spec = Parse(builder);
  EXPECT_FALSE(spec.ok());
  if (spec.ok()) return "";
  EXPECT_THAT(std::string(spec.status().message()), HasSubstr("m.gguf"));
  return std::string(spec.status().message());
}

TEST(GgufModel, ShapeAndDefaults) {
  const ModelSpec spec = Spec(Metadata("llama"));
  EXPECT_EQ(spec.model_type, "llama");
  EXPECT_EQ(spec.vocab_size, 97);
  EXPECT_EQ(spec.hidden_size, 32);
  EXPECT_EQ(spec.intermediate_size, 64);
  EXPECT_EQ(spec.num_layers, 3);
  EXPECT_EQ(spec.total_query_heads, 4);
  EXPECT_EQ(spec.total_kv_heads, 2);
  EXPECT_EQ(spec.head_dim, 8);
  EXPECT_EQ(spec.max_position_embeddings, 128);
  EXPECT_FLOAT_EQ(spec.rms_norm_epsilon, 1e-5f);
  EXPECT_EQ(spec.rope.theta, 10000.0);
  EXPECT_EQ(spec.rope.scaling, RopeSpec::Scaling::kNone);
  EXPECT_THAT(spec.windows, ElementsAre(0, 0, 0));
  EXPECT_TRUE(spec.tie_word_embeddings);
}

TEST(GgufModel, OnlyLlamaRotatesNeighbours) {
  EXPECT_TRUE(Spec(Metadata("llama")).rope.interleaved);
  EXPECT_FALSE(Spec(Metadata("qwen2")).rope.interleaved);
  EXPECT_FALSE(Spec(Metadata("qwen3")).rope.interleaved);
  EXPECT_TRUE(Spec(Metadata("qwen2")).qkv_bias);
  EXPECT_FALSE(Spec(Metadata("llama")).qkv_bias);
  EXPECT_TRUE(Spec(Metadata("qwen3")).qk_norm);
}

TEST(GgufModel, WhatTensorsSay) {
  const std::string floats(97 * 32 * 4, '\0');
  const ModelSpec spec =
      Spec(Metadata("llama")
               .Tensor("output.weight", {97, 32}, 0, floats)
               .Tensor("blk.0.attn_q.weight", {32, 32}, 8, std::string(32 * 34, '\0'))
               .Tensor("blk.0.attn_q.bias", {32}, 0, std::string(128, '\0'))
               .Tensor("blk.0.attn_output.bias", {32}, 0, std::string(128, '\0'))
               .Tensor("blk.0.ffn_gate.bias", {64}, 0, std::string(256, '\0')));
  EXPECT_FALSE(spec.tie_word_embeddings);
  EXPECT_TRUE(spec.qkv_bias && spec.output_bias && spec.mlp_bias);
  EXPECT_EQ(spec.stored_dtype, DType::kQ8_0);
}

TEST(GgufModel, VocabularySizeIsThatOfTheEmbeddingWithoutAKey) {
  GgufBuilder builder;
  builder.String("general.architecture", "llama")
      .Uint32("llama.embedding_length", 32)
      .Uint32("llama.feed_forward_length", 64)
      .Uint32("llama.block_count", 3)
      .Uint32("llama.attention.head_count", 4)
      .Uint32("llama.context_length", 128)
      .Float32("llama.attention.layer_norm_rms_epsilon", 1e-5f)
      .Tensor("token_embd.weight", {272, 32}, 1, std::string(272 * 64, '\0'));
  const ModelSpec spec = Spec(builder);
  EXPECT_EQ(spec.vocab_size, 272);
  EXPECT_EQ(spec.total_kv_heads, 4);
}

TEST(GgufModel, HeadDimAndWindow) {
  const ModelSpec spec = Spec(Metadata("qwen3")
                                  .Uint32("qwen3.attention.key_length", 16)
                                  .Uint32("qwen3.attention.value_length", 16)
                                  .Uint32("qwen3.rope.dimension_count", 16)
                                  .Float32("qwen3.rope.freq_base", 1e6f)
                                  .Uint32("qwen3.attention.sliding_window", 4));
  EXPECT_EQ(spec.head_dim, 16);
  EXPECT_EQ(spec.rope.rotary_dim, 16);
  EXPECT_EQ(spec.rope.theta, 1e6);
  EXPECT_THAT(spec.windows, Each(4));
  EXPECT_THAT(Error(Metadata("qwen3").Uint32("qwen3.attention.value_length", 16)),
              HasSubstr("value_length"));
  EXPECT_THAT(Error(Metadata("llama").Uint32("llama.rope.dimension_count", 4)),
              AllOf(HasSubstr("dimension_count"), HasSubstr("is 4"), HasSubstr("heads of 8")));
}

TEST(GgufModel, NumbersOfLayersMustAgree) {
  const auto heads = [](std::vector<uint32_t> counts) {
    std::string bytes = absl::StrCat(Bytes<uint32_t>(4), Bytes<uint64_t>(counts.size()));
    for (const uint32_t count : counts) bytes += Bytes(count);
    GgufBuilder builder;
    builder.String("general.architecture", "llama")
        .Uint32("llama.embedding_length", 32)
        .Uint32("llama.feed_forward_length", 64)
        .Uint32("llama.block_count", 3)
        .Uint32("llama.attention.head_count", 4)
        .Raw("llama.attention.head_count_kv", 9, bytes)
        .Uint32("llama.context_length", 128)
        .Uint32("llama.vocab_size", 97)
        .Float32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    return builder;
  };
  EXPECT_EQ(Spec(heads({2, 2, 2})).total_kv_heads, 2);
  EXPECT_THAT(Error(heads({2, 1, 2})), HasSubstr("head_count_kv: layers of different shapes"));
  EXPECT_THAT(Error(heads({})), HasSubstr("head_count_kv"));
}

TEST(GgufModel, LinearScaling) {
  EXPECT_EQ(Spec(Metadata("llama").Float32("llama.rope.scaling.factor", 4.0f)).rope.scaling,
            RopeSpec::Scaling::kLinear);
  const RopeSpec rope = Spec(Metadata("llama")
                                 .String("llama.rope.scaling.type", "linear")
                                 .Float32("llama.rope.scaling.factor", 4.0f))
                            .rope;
  EXPECT_EQ(rope.scaling, RopeSpec::Scaling::kLinear);
  EXPECT_EQ(rope.factor, 4.0);
  EXPECT_EQ(Spec(Metadata("llama").Float32("llama.rope.scale_linear", 2.0f)).rope.factor, 2.0);
  EXPECT_EQ(Spec(Metadata("llama").Float32("llama.rope.scaling.factor", 0.0f)).rope.scaling,
            RopeSpec::Scaling::kNone);
  EXPECT_EQ(Spec(Metadata("llama")
                     .String("llama.rope.scaling.type", "none")
                     .Float32("llama.rope.scaling.factor", 4.0f))
                .rope.scaling,
            RopeSpec::Scaling::kNone);
}

TEST(GgufModel, YarnScaling) {
  const auto yarn = [] {
    return Metadata("qwen2")
        .String("qwen2.rope.scaling.type", "yarn")
        .Float32("qwen2.rope.scaling.factor", 4.0f)
        .Uint32("qwen2.rope.scaling.original_context_length", 32);
  };
  RopeSpec expected;
  expected.rotary_dim = 8;
  expected.scaling = RopeSpec::Scaling::kYarn;
  expected.factor = 4.0;
  expected.original_max_position_embeddings = 32;
  const RopeSpec rope = Spec(yarn()).rope;
  EXPECT_EQ(CosSinTable(rope, 100), CosSinTable(expected, 100));
  EXPECT_NEAR(AttentionFactor(rope), 0.1 * std::log(4.0) + 1.0, 1e-12);
  const RopeSpec scaled = Spec(yarn()
                                   .Float32("qwen2.rope.scaling.attn_factor", 0.5f)
                                   .Float32("qwen2.rope.scaling.yarn_beta_fast", 16.0f))
                              .rope;
  EXPECT_NEAR(AttentionFactor(scaled), 0.5 * (0.1 * std::log(4.0) + 1.0), 1e-12);
  EXPECT_EQ(scaled.beta_fast, 16.0);
  EXPECT_THAT(Error(yarn().Float32("qwen2.rope.scaling.yarn_ext_factor", 0.0f)),
              HasSubstr("yarn_ext_factor"));
  EXPECT_THAT(Error(Metadata("llama").String("llama.rope.scaling.type", "longrope")),
              AllOf(HasSubstr("longrope"), HasSubstr("none, linear, yarn")));
}

TEST(GgufModel, RopeFreqs) {
  const auto with = [](const std::vector<float>& factors, uint32_t type = 0) {
    std::string bytes;
    for (const float factor : factors) bytes += Bytes(factor);
    return Metadata("llama").Tensor("rope_freqs.weight", {static_cast<int64_t>(factors.size())},
                                    type, bytes);
  };
  EXPECT_THAT(Spec(with({1, 2, 4, 8})).rope.frequency_factors, ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(Error(with({1, 2, 4})),
              AllOf(HasSubstr("rope_freqs.weight"), HasSubstr("[4]"), HasSubstr("[3]")));
  // Heads of one element have no pair to rotate.
  GgufBuilder narrow = with({});
  EXPECT_THAT(Error(narrow.Uint32("llama.attention.key_length", 1)),
              HasSubstr("rope_freqs.weight: expected F32 [0]"));
  for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_THAT(Error(with({1, 2, bad, 8})), HasSubstr("not a positive number"));
  }
}

TEST(GgufModel, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(Error(Metadata("gemma2")),
              AllOf(HasSubstr("\"gemma2\""), HasSubstr("llama, qwen2, qwen3")));
  EXPECT_THAT(Error(GgufBuilder()), HasSubstr("general.architecture"));
  EXPECT_THAT(Error(GgufBuilder().Uint32("general.architecture", 1)),
              HasSubstr("general.architecture"));
  EXPECT_THAT(Error(Metadata("llama").Uint32("llama.expert_count", 8)), HasSubstr("expert_count"));
  EXPECT_THAT(Error(Metadata("llama").Uint32("split.count", 3)), HasSubstr("split.count"));
}

TEST(GgufModel, ListsEveryProblem) {
  EXPECT_THAT(Error(GgufBuilder().String("general.architecture", "llama")),
              AllOf(HasSubstr("llama.embedding_length: missing"),
                    HasSubstr("llama.feed_forward_length: missing"),
                    HasSubstr("llama.block_count: missing"),
                    HasSubstr("llama.attention.head_count: missing"),
                    HasSubstr("llama.context_length: missing"),
                    HasSubstr("layer_norm_rms_epsilon: missing")));
  GgufBuilder builder;
  builder.String("general.architecture", "llama")
      .String("llama.embedding_length", "32")
      .Float32("llama.block_count", 2.0f)
      .Bool("llama.attention.head_count", true)
      .Strings("llama.context_length", {"1"})
      .String("llama.attention.layer_norm_rms_epsilon", "small");
  EXPECT_THAT(
      Error(builder),
      AllOf(HasSubstr("llama.embedding_length: expected a whole number, found string"),
            HasSubstr("llama.block_count: expected a whole number, found float32"),
            HasSubstr("llama.attention.head_count: expected a whole number, found bool"),
            HasSubstr("llama.context_length: expected a whole number, found array of string"),
            HasSubstr("rms_epsilon: expected a number, found string")));
}

TEST(GgufModel, RefusesNumbersThatMakeNoSense) {
  GgufBuilder builder;
  builder.String("general.architecture", "llama")
      .Uint32("llama.embedding_length", 0xffffffff)
      .Uint32("llama.feed_forward_length", 0)
      .Uint32("llama.block_count", 0xffffffff)
      .Uint32("llama.attention.head_count", 3)
      .Uint32("llama.attention.head_count_kv", 2)
      .Uint32("llama.context_length", 128)
      .Uint32("llama.vocab_size", 97)
      .Float32("llama.rope.freq_base", 0.0f)
      .Float32("llama.attention.layer_norm_rms_epsilon", -1.0f);
  EXPECT_THAT(Error(builder),
              AllOf(HasSubstr("hidden_size is 4294967295"), HasSubstr("intermediate_size is 0"),
                    HasSubstr("num_hidden_layers is 4294967295"), HasSubstr("multiple"),
                    HasSubstr("rope_theta is 0"), HasSubstr("rms_norm_eps is -1")));
  // No head at all.
  EXPECT_THAT(Error(GgufBuilder()
                        .String("general.architecture", "llama")
                        .Uint32("llama.embedding_length", 32)
                        .Uint32("llama.feed_forward_length", 64)
                        .Uint32("llama.block_count", 3)
                        .Uint32("llama.attention.head_count", 0)
                        .Uint32("llama.context_length", 128)
                        .Float32("llama.attention.layer_norm_rms_epsilon", 1e-5f)),
              HasSubstr("num_attention_heads is 0"));
}

TEST(GgufModel, EndOfSequence) {
  EXPECT_THAT(Spec(Metadata("llama")
                       .Uint32("tokenizer.ggml.eos_token_id", 2)
                       .Uint32("tokenizer.ggml.eot_token_id", 5)
                       .Uint32("tokenizer.ggml.bos_token_id", 1))
                  .eos_token_ids,
              ElementsAre(2, 5));
  EXPECT_THAT(Spec(Metadata("llama")
                       .Uint32("tokenizer.ggml.eos_token_id", 2)
                       .Uint32("tokenizer.ggml.eot_token_id", 2))
                  .eos_token_ids,
              ElementsAre(2));
  EXPECT_THAT(Error(Metadata("llama").Uint32("tokenizer.ggml.eos_token_id", 97)),
              HasSubstr("eos_token_id is 97"));
  EXPECT_THAT(Error(Metadata("llama").Uint32("tokenizer.ggml.bos_token_id", 0xffffffff)),
              HasSubstr("4294967295 is no token id"));
}

TEST(GgufModel, Vocabulary) {
  const std::string contents =
      GgufBuilder()
          .String("tokenizer.ggml.model", "gpt2")
          .String("tokenizer.ggml.pre", "smollm")
          .Strings("tokenizer.ggml.tokens", {"a", "b", std::string("\0c", 2)})
          .Strings("tokenizer.ggml.merges", {"a b"})
          .Raw("tokenizer.ggml.scores", 9,
               absl::StrCat(Bytes<uint32_t>(6), Bytes<uint64_t>(1), Bytes(-0.5f)))
          .Raw("tokenizer.ggml.token_type", 9,
               absl::StrCat(Bytes<uint32_t>(5), Bytes<uint64_t>(2), Bytes(1), Bytes(3)))
          .Uint32("tokenizer.ggml.bos_token_id", 1)
          .Uint32("tokenizer.ggml.unknown_token_id", 0)
          .Bool("tokenizer.ggml.add_bos_token", false)
          .Bool("tokenizer.ggml.add_space_prefix", true)
          .Build();
  const auto file = ParseGguf(contents, "m.gguf");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto vocabulary = ReadGgufVocabulary(*file, "m.gguf");
  ASSERT_TRUE(vocabulary.ok()) << vocabulary.status();
  EXPECT_EQ(vocabulary->model, "gpt2");
  EXPECT_EQ(vocabulary->pre, "smollm");
  EXPECT_THAT(vocabulary->tokens, ElementsAre("a", "b", std::string("\0c", 2)));
  EXPECT_THAT(vocabulary->merges, ElementsAre("a b"));
  EXPECT_THAT(vocabulary->scores, ElementsAre(-0.5f));
  EXPECT_THAT(vocabulary->token_types, ElementsAre(1, 3));
  EXPECT_EQ(vocabulary->bos_id, 1u);
  EXPECT_FALSE(vocabulary->eos_id.has_value());
  EXPECT_EQ(vocabulary->unknown_id, 0u);
  EXPECT_EQ(vocabulary->add_bos, false);
  EXPECT_FALSE(vocabulary->add_eos.has_value());
  EXPECT_EQ(vocabulary->add_space_prefix, true);
}

TEST(GgufModel, VocabularyOfTheWrongTypes) {
  const std::string contents =
      GgufBuilder()
          .Uint32("tokenizer.ggml.model", 3)
          .String("tokenizer.ggml.tokens", "abc")
          .Strings("tokenizer.ggml.scores", {"1"})
          .Raw("tokenizer.ggml.token_type", 9,
               absl::StrCat(Bytes<uint32_t>(11), Bytes<uint64_t>(1), Bytes(int64_t{1} << 40)))
          .Raw("tokenizer.ggml.merges", 9,
               absl::StrCat(Bytes<uint32_t>(0), Bytes<uint64_t>(1), "x"))
          .String("tokenizer.ggml.add_bos_token", "false")
          .Build();
  const auto file = ParseGguf(contents, "m.gguf");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto vocabulary = ReadGgufVocabulary(*file, "m.gguf");
  ASSERT_FALSE(vocabulary.ok());
  EXPECT_THAT(std::string(vocabulary.status().message()),
              AllOf(HasSubstr("tokenizer.ggml.model: expected a string, found uint32"),
                    HasSubstr("tokenizer.ggml.tokens: expected a list of strings, found string"),
                    HasSubstr("tokenizer.ggml.scores"), HasSubstr("tokenizer.ggml.token_type"),
                    HasSubstr("tokenizer.ggml.merges: expected a list of strings, found array of "
                              "uint8"),
                    HasSubstr("tokenizer.ggml.add_bos_token")));
}

TEST(GgufModel, Names) {
  EXPECT_EQ(HuggingFaceName("token_embd.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(HuggingFaceName("output_norm.weight"), "model.norm.weight");
  EXPECT_EQ(HuggingFaceName("output.weight"), "lm_head.weight");
  EXPECT_EQ(HuggingFaceName("blk.12.attn_q.bias"), "model.layers.12.self_attn.q_proj.bias");
  EXPECT_EQ(HuggingFaceName("blk.0.attn_output.weight"), "model.layers.0.self_attn.o_proj.weight");
  EXPECT_EQ(HuggingFaceName("blk.0.attn_norm.weight"), "model.layers.0.input_layernorm.weight");
  EXPECT_EQ(HuggingFaceName("blk.0.ffn_norm.weight"),
            "model.layers.0.post_attention_layernorm.weight");
  EXPECT_EQ(HuggingFaceName("blk.0.ffn_down.weight"), "model.layers.0.mlp.down_proj.weight");
  EXPECT_EQ(HuggingFaceName("blk.0.attn_k_norm.weight"), "model.layers.0.self_attn.k_norm.weight");
  EXPECT_EQ(HuggingFaceName("blk.0.ssm_a.weight"), "model.layers.0.ssm_a.weight");
  EXPECT_EQ(HuggingFaceName("blk.0"), "blk.0");
  EXPECT_EQ(HuggingFaceName("attn_q"), "attn_q");
  EXPECT_EQ(HuggingFaceName(""), "");
}

TEST(GgufModel, OpensEveryGoldenFile) {
  const std::vector<std::string> names = GoldenGgufNames();
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const auto golden = LoadGoldenGguf(name);
    ASSERT_TRUE(golden.ok()) << golden.status();
    auto checkpoint = OpenCheckpoint(golden->path, LoadFormat::kAuto, 0);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->spec.vocab_size, golden->vocab_size);
    EXPECT_EQ(checkpoint->weights->tensors().size(), ExpectedTensors(checkpoint->spec).size());
    const auto frequencies = InverseFrequencies(checkpoint->spec.rope, golden->max_model_len);
    ASSERT_EQ(frequencies.size(), golden->rope_inv_freq.size());
    for (size_t i = 0; i < frequencies.size(); ++i) {
      EXPECT_NEAR(frequencies[i] / golden->rope_inv_freq[i], 1.0, 2e-6) << i;
    }
  }
}

}  // namespace
}  // namespace heddle
