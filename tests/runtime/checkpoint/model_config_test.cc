#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/checkpoint/generation_defaults.h"
#include "runtime/model/model_spec.h"
#include "tests/runtime/checkpoint/parse_config.h"

namespace heddle {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

json Llama() {
  return {{"model_type", "llama"},    {"vocab_size", 259},
          {"hidden_size", 64},        {"intermediate_size", 96},
          {"num_hidden_layers", 4},   {"num_attention_heads", 8},
          {"num_key_value_heads", 2}, {"max_position_embeddings", 128},
          {"rms_norm_eps", 1e-5},     {"bos_token_id", 1},
          {"eos_token_id", 2},        {"tie_word_embeddings", false}};
}

json Family(const std::string& model_type) {
  json config = Llama();
  config["model_type"] = model_type;
  return config;
}

TEST(ModelConfig, Llama) {
  const ModelSpec spec = Parse(Llama());
  EXPECT_EQ(spec.model_type, "llama");
  EXPECT_EQ(spec.vocab_size, 259);
  EXPECT_EQ(spec.hidden_size, 64);
  EXPECT_EQ(spec.intermediate_size, 96);
  EXPECT_EQ(spec.num_layers, 4);
  EXPECT_EQ(spec.total_query_heads, 8);
  EXPECT_EQ(spec.total_kv_heads, 2);
  EXPECT_EQ(spec.head_dim, 8);
  EXPECT_EQ(spec.rms_norm_epsilon, 1e-5);
  EXPECT_EQ(spec.max_position_embeddings, 128);
  EXPECT_EQ(spec.rope.rotary_dim, 8);
  EXPECT_EQ(spec.rope.theta, 10000.0);
  EXPECT_FALSE(spec.rope.interleaved);
  EXPECT_THAT(spec.windows, ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(spec.eos_token_ids, ElementsAre(2));
  EXPECT_EQ(spec.bos_token_id, 1);
  EXPECT_EQ(spec.stored_dtype, DType::kFloat32);
  EXPECT_FALSE(spec.tie_word_embeddings || spec.qkv_bias || spec.output_bias || spec.mlp_bias ||
               spec.qk_norm);
}

TEST(ModelConfig, AbsentKeysTakeTheirDefaults) {
  json config = Llama();
  for (const char* key : {"num_key_value_heads", "rms_norm_eps", "bos_token_id", "eos_token_id",
                          "tie_word_embeddings"}) {
    config.erase(key);
  }
  const ModelSpec spec = Parse(config);
  EXPECT_EQ(spec.total_kv_heads, 8);
  EXPECT_EQ(spec.rms_norm_epsilon, 1e-6);
  EXPECT_FALSE(spec.bos_token_id.has_value());
  EXPECT_THAT(spec.eos_token_ids, IsEmpty());
  EXPECT_FALSE(spec.tie_word_embeddings);
  // null says the same as no key at all.
  EXPECT_EQ(Parse(With(Llama(), {{"num_key_value_heads", nullptr}, {"rope_scaling", nullptr}}))
                .total_kv_heads,
            8);
}

TEST(ModelConfig, HeadDim) {
  EXPECT_EQ(Parse(With(Llama(), {{"head_dim", 16}})).head_dim, 16);
  EXPECT_EQ(Parse(With(Llama(), {{"head_dim", 16}})).rope.rotary_dim, 16);
  EXPECT_EQ(Parse(With(Llama(), {{"head_dim", nullptr}})).head_dim, 8);
  EXPECT_EQ(Parse(Family("qwen3")).head_dim, 128);
  EXPECT_THAT(Error(With(Llama(), {{"hidden_size", 60}})),
              AllOf(HasSubstr("head_dim"), HasSubstr("60"), HasSubstr("num_attention_heads (8)")));
  EXPECT_EQ(Parse(With(Llama(), {{"hidden_size", 60}, {"head_dim", 8}})).head_dim, 8);
}

TEST(ModelConfig, EndOfSequenceIdsAreOneOrMany) {
  EXPECT_THAT(Parse(With(Llama(), {{"eos_token_id", {2, 7, 258}}})).eos_token_ids,
              ElementsAre(2, 7, 258));
  EXPECT_THAT(Parse(With(Llama(), {{"eos_token_id", nullptr}})).eos_token_ids, IsEmpty());
  EXPECT_THAT(Error(With(Llama(), {{"eos_token_id", {2, 259}}})),
              AllOf(HasSubstr("eos_token_id"), HasSubstr("259")));
  EXPECT_THAT(Error(With(Llama(), {{"eos_token_id", -1}})), HasSubstr("-1 is no token id"));
  EXPECT_THAT(Error(With(Llama(), {{"eos_token_id", "2"}})), HasSubstr("the string \"2\""));
}

TEST(ModelConfig, BiasesAndNormsByFamily) {
  const ModelSpec llama = Parse(With(Llama(), {{"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_TRUE(llama.qkv_bias && llama.output_bias && llama.mlp_bias);
  const ModelSpec qwen2 = Parse(Family("qwen2"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias || qwen2.mlp_bias || qwen2.qk_norm);
  const ModelSpec qwen3 = Parse(Family("qwen3"));
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_TRUE(Parse(With(Family("qwen3"), {{"attention_bias", true}})).output_bias);
  EXPECT_FALSE(Parse(Family("mistral")).qkv_bias);

  EXPECT_THAT(TensorNames(llama),
              AllOf(Contains("model.layers.3.self_attn.o_proj.bias"),
                    Contains("model.layers.0.mlp.down_proj.bias"), Contains("lm_head.weight")));
  EXPECT_THAT(TensorNames(qwen2), AllOf(Contains("model.layers.3.self_attn.q_proj.bias"),
                                        Not(Contains("model.layers.3.self_attn.o_proj.bias"))));
  EXPECT_THAT(TensorNames(qwen3), Contains("model.layers.0.self_attn.k_norm.weight"));
  EXPECT_THAT(TensorNames(Parse(With(Llama(), {{"tie_word_embeddings", true}}))),
              Not(Contains("lm_head.weight")));
}

TEST(ModelConfig, SlidingWindowOfMistral) {
  const json mistral = Family("mistral");
  EXPECT_THAT(Parse(With(mistral, {{"sliding_window", 4}})).windows, ElementsAre(4, 4, 4, 4));
  EXPECT_THAT(Parse(With(mistral, {{"sliding_window", nullptr}})).windows, Each(0));
  EXPECT_THAT(Parse(mistral).windows, Each(4096));
  EXPECT_THAT(Error(With(mistral, {{"sliding_window", -3}})), HasSubstr("sliding_window is -3"));
  EXPECT_THAT(Error(With(mistral, {{"sliding_window", "4"}})),
              AllOf(HasSubstr("1 problem:"), HasSubstr("sliding_window: expected a whole number")));
}

TEST(ModelConfig, SlidingWindowOfQwen) {
  for (const char* model_type : {"qwen2", "qwen3"}) {
    const json qwen = Family(model_type);
    EXPECT_THAT(Parse(With(qwen, {{"sliding_window", 4}})).windows, Each(0));
    const json windowed = With(qwen, {{"sliding_window", 4}, {"use_sliding_window", true}});
    EXPECT_THAT(Parse(windowed).windows, Each(0));  // max_window_layers is 28 by default
    EXPECT_THAT(Parse(With(windowed, {{"max_window_layers", 1}})).windows, ElementsAre(0, 4, 4, 4));
    EXPECT_THAT(Parse(With(windowed, {{"max_window_layers", 0}})).windows, Each(4));
    EXPECT_THAT(Parse(With(windowed, {{"max_window_layers", 1000000}})).windows, Each(0));
    EXPECT_THAT(
        Parse(With(windowed, {{"sliding_window", nullptr}, {"max_window_layers", 0}})).windows,
        Each(0));
    const json types = {"sliding_attention", "full_attention", "sliding_attention",
                        "full_attention"};
    EXPECT_THAT(Parse(With(windowed, {{"layer_types", types}})).windows, ElementsAre(4, 0, 4, 0));
  }
  EXPECT_THAT(Parse(With(Llama(), {{"sliding_window", 4}})).windows, Each(0));
}

TEST(ModelConfig, LayerTypesAreChecked) {
  const json full = {"full_attention", "full_attention", "full_attention", "full_attention"};
  const json sliding = {"full_attention", "full_attention", "full_attention", "sliding_attention"};
  EXPECT_THAT(Parse(With(Llama(), {{"layer_types", full}})).windows, Each(0));
  EXPECT_THAT(Error(With(Llama(), {{"layer_types", sliding}})),
              AllOf(HasSubstr("layer_types"), HasSubstr("layer 3")));
  EXPECT_THAT(Error(With(Llama(), {{"layer_types", {"full_attention"}}})),
              HasSubstr("lists 1 layers of 4"));
  EXPECT_THAT(
      Error(With(Llama(),
                 {{"layer_types",
                   {"full_attention", "full_attention", "linear_attention", "full_attention"}}})),
      AllOf(HasSubstr("linear_attention"), HasSubstr("supported are")));
  // A list of sliding layers without a window to slide.
  EXPECT_THAT(Error(With(Family("qwen2"), {{"use_sliding_window", true},
                                           {"sliding_window", nullptr},
                                           {"layer_types", sliding}})),
              HasSubstr("layer 3"));
}

TEST(ModelConfig, StoredDType) {
  EXPECT_EQ(Parse(With(Llama(), {{"torch_dtype", "bfloat16"}})).stored_dtype, DType::kBFloat16);
  EXPECT_EQ(Parse(With(Llama(), {{"dtype", "float16"}})).stored_dtype, DType::kFloat16);
  EXPECT_THAT(Error(With(Llama(), {{"torch_dtype", "float8_e4m3fn"}})),
              AllOf(HasSubstr("torch_dtype"), HasSubstr("float8_e4m3fn")));
  EXPECT_THAT(Error(With(Llama(), {{"dtype", "Q8_0"}})), HasSubstr("dtype"));
}

TEST(ModelConfig, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(Error(With(Llama(), {{"model_type", "falcon"}})),
              AllOf(HasSubstr("\"falcon\""), HasSubstr("llama, mistral, qwen2, qwen3, mixtral")));
  json nameless = Llama();
  nameless.erase("model_type");
  EXPECT_THAT(Error(nameless), HasSubstr("model_type"));
  EXPECT_THAT(Error(With(Llama(), {{"hidden_act", "gelu"}})),
              AllOf(HasSubstr("hidden_act"), HasSubstr("gelu"), HasSubstr("\"silu\" is")));
  EXPECT_THAT(Error(With(Llama(), {{"quantization_config", {{"quant_method", "awq"}}}})),
              AllOf(HasSubstr("quantization_config"), HasSubstr("awq"), HasSubstr("GGUF")));
  EXPECT_THAT(Error(With(Llama(), {{"partial_rotary_factor", 0.5}})),
              HasSubstr("partial_rotary_factor"));
}

TEST(ModelConfig, RopeScaling) {
  const auto rope = [](const json& parameters) {
    return Error(With(Llama(), {{"rope_scaling", parameters}}));
  };
  EXPECT_THAT(rope({{"type", "longrope"}, {"factor", 2}}),
              AllOf(HasSubstr("rope_scaling.rope_type"), HasSubstr("longrope"),
                    HasSubstr("default, linear, dynamic, llama3, yarn")));
  EXPECT_THAT(rope({{"factor", 2}}), HasSubstr("rope_type: missing"));
  EXPECT_THAT(rope({{"type", "linear"}}), HasSubstr("rope_scaling.factor: missing"));
  EXPECT_THAT(rope({{"type", "linear"}, {"factor", 0.5}}), HasSubstr("at least 1"));
  EXPECT_THAT(rope({{"type", "linear"}, {"factor", "2"}}),
              HasSubstr("rope_scaling.factor: expected a number, found the string \"2\""));
  EXPECT_THAT(rope({{"rope_type", "llama3"}, {"factor", 8}}),
              AllOf(HasSubstr("low_freq_factor: missing"), HasSubstr("high_freq_factor: missing")));
  EXPECT_THAT(rope({{"rope_type", "llama3"},
                    {"factor", 8},
                    {"low_freq_factor", 4},
                    {"high_freq_factor", 4}}),
              HasSubstr("high_freq_factor is 4"));
  EXPECT_THAT(rope({{"rope_type", "yarn"}, {"factor", 8}, {"beta_fast", -1}}),
              HasSubstr("beta_fast is -1"));
  EXPECT_THAT(rope({{"rope_type", "yarn"}, {"factor", 8}, {"original_max_position_embeddings", 0}}),
              HasSubstr("original_max_position_embeddings is 0"));
  EXPECT_THAT(rope("yarn"), HasSubstr("rope_scaling: expected an object"));
  EXPECT_THAT(rope({{"full_attention", {{"rope_type", "default"}}}}),
              HasSubstr("rope_scaling.full_attention: parameters per kind of layer"));
  EXPECT_THAT(Error(With(Llama(), {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}},
                                   {"rope_parameters", {{"rope_type", "default"}}}})),
              HasSubstr("differs from rope_scaling"));
  EXPECT_THAT(Error(With(Llama(), {{"rope_theta", 1}})), HasSubstr("rope_theta is 1"));
  EXPECT_THAT(Error(With(Llama(), {{"head_dim", 7}})), HasSubstr("rotary dimension 7"));

  // rope_type wins over the older type; a theta inside wins over one outside.
  const RopeSpec spec =
      Parse(With(Llama(), {{"rope_theta", 5.0},
                           {"rope_parameters",
                            {{"rope_theta", 7.0}, {"rope_type", "default"}, {"type", "linear"}}}}))
          .rope;
  EXPECT_EQ(spec.scaling, RopeSpec::Scaling::kNone);
  EXPECT_EQ(spec.theta, 7.0);
  // Without a factor YaRN's is the ratio of the lengths.
  EXPECT_EQ(Parse(With(Llama(), {{"rope_scaling",
                                  {{"type", "yarn"},
                                   {"factor", nullptr},
                                   {"original_max_position_embeddings", 32}}}}))
                .rope.factor,
            4.0);
  // Some files keep the original length outside.
  EXPECT_EQ(Parse(With(Llama(), {{"original_max_position_embeddings", 64},
                                 {"rope_scaling", {{"type", "yarn"}, {"factor", 2}}}}))
                .rope.original_max_position_embeddings,
            64);
}

TEST(ModelConfig, NamesTypeErrors) {
  const std::string error = Error(With(Llama(), {{"num_attention_heads", "8"},
                                                 {"hidden_size", 64.5},
                                                 {"vocab_size", json::array({1})},
                                                 {"num_hidden_layers", true},
                                                 {"intermediate_size", json::object()},
                                                 {"rms_norm_eps", "small"},
                                                 {"tie_word_embeddings", 1},
                                                 {"hidden_act", 5}}));
  EXPECT_THAT(error, AllOf(HasSubstr("8 problems"),
                           HasSubstr("num_attention_heads: expected a whole number, found the "
                                     "string \"8\""),
                           HasSubstr("hidden_size: expected a whole number, found the number 64.5"),
                           HasSubstr("vocab_size: expected a whole number, found the array [1]"),
                           HasSubstr("num_hidden_layers: expected a whole number, found the "
                                     "boolean true")));
  EXPECT_THAT(error, AllOf(HasSubstr("intermediate_size: expected a whole number, found the "
                                     "object {}"),
                           HasSubstr("rms_norm_eps: expected a number, found the string \"small\""),
                           HasSubstr("tie_word_embeddings: expected true or false, found the "
                                     "number 1"),
                           HasSubstr("hidden_act: expected a string, found the number 5")));
}

TEST(ModelConfig, ListsEveryMissingKey) {
  EXPECT_THAT(ErrorOfText(R"({"model_type": "qwen2"})"),
              AllOf(HasSubstr("7 problems"), HasSubstr("num_key_value_heads: missing")));
  EXPECT_THAT(
      ErrorOfText(R"({"model_type": "llama"})"),
      AllOf(HasSubstr("6 problems"), HasSubstr("vocab_size: missing"),
            HasSubstr("hidden_size: missing"), HasSubstr("intermediate_size: missing"),
            HasSubstr("num_hidden_layers: missing"), HasSubstr("num_attention_heads: missing"),
            HasSubstr("max_position_embeddings: missing")));
}

TEST(ModelConfig, RefusesNumbersThatMakeNoSense) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
    for (const int64_t value : {int64_t{0}, int64_t{-8}, huge}) {
      EXPECT_THAT(Error(With(Llama(), {{key, value}})),
                  AllOf(HasSubstr(key), HasSubstr(absl::StrCat(value))));
    }
    EXPECT_THAT(Error(With(Llama(), {{key, uint64_t{1} << 63}})), HasSubstr(key));
  }
  EXPECT_THAT(Error(With(Llama(), {{"num_key_value_heads", 3}})),
              AllOf(HasSubstr("num_attention_heads (8)"), HasSubstr("multiple"),
                    HasSubstr("num_key_value_heads (3)")));
  EXPECT_THAT(Error(With(Llama(), {{"rms_norm_eps", 0}})), HasSubstr("rms_norm_eps is 0"));
  EXPECT_THAT(Error(With(Llama(), {{"bos_token_id", 259}})), HasSubstr("bos_token_id is 259"));
  // Several at once.
  EXPECT_THAT(Error(With(Llama(), {{"vocab_size", 0}, {"num_key_value_heads", 3}})),
              AllOf(HasSubstr("vocab_size is 0"), HasSubstr("multiple")));
}

TEST(ModelConfig, HostileJson) {
  const std::string good = Llama().dump();
  EXPECT_THAT(ErrorOfText(""), HasSubstr("not a valid JSON"));
  EXPECT_THAT(ErrorOfText("[]"), HasSubstr("expected a JSON object, found array"));
  EXPECT_THAT(ErrorOfText("3"), HasSubstr("found number"));
  EXPECT_THAT(ErrorOfText(good.substr(0, good.size() - 1)), HasSubstr("line 1"));
  EXPECT_THAT(ErrorOfText(good + "x"), HasSubstr("not a valid JSON"));
  EXPECT_THAT(ErrorOfText(good + good), HasSubstr("not a valid JSON"));
  EXPECT_THAT(ErrorOfText("{\"model_type\": \"llama\", \"a\": NaN}"),
              HasSubstr("not a valid JSON"));
  EXPECT_THAT(ErrorOfText("{\"a\": 1e999}"), HasSubstr("not a valid JSON"));
  EXPECT_THAT(ErrorOfText("{\"a\": \"\xff\"}"), HasSubstr("not a valid JSON"));
  EXPECT_THAT(ErrorOfText("{\"a\": \"\\ud800\"}"), HasSubstr("not a valid JSON"));
  EXPECT_THAT(ErrorOfText(absl::string_view("{\"a\0\": 1}", 9)), HasSubstr("not a valid JSON"));
  const std::string twice = absl::StrCat("{\"vocab_size\": 9, ", good.substr(1));
  EXPECT_THAT(ErrorOfText(twice), HasSubstr("the key \"vocab_size\" twice"));
  for (const size_t depth : {size_t{65}, size_t{10000}, size_t{1000000}}) {
    const std::string nested =
        absl::StrCat("{\"a\": ", std::string(depth, '['), std::string(depth, ']'), "}");
    EXPECT_THAT(ErrorOfText(nested), HasSubstr("nesting deeper than 64"));
    const std::string unclosed = std::string(depth, '[');
    EXPECT_THAT(ErrorOfText(unclosed), HasSubstr("nesting deeper than 64"));
  }
}

TEST(ModelSpec, IgnorableTensors) {
  ModelSpec spec = Parse(Llama());
  EXPECT_TRUE(IsIgnorableTensor(spec, "model.layers.0.self_attn.rotary_emb.inv_freq"));
  EXPECT_TRUE(IsIgnorableTensor(spec, "model.layers.4.mlp.up_proj.weight"));
  EXPECT_TRUE(IsIgnorableTensor(spec, "model.layers.61.embed_tokens.weight"));
  EXPECT_TRUE(IsIgnorableTensor(spec, "mtp.layers.0.mlp.up_proj.weight"));
  EXPECT_FALSE(IsIgnorableTensor(spec, "model.layers.3.mlp.extra.weight"));
  EXPECT_FALSE(IsIgnorableTensor(spec, "model.layers.x.mlp.up_proj.weight"));
  EXPECT_FALSE(IsIgnorableTensor(spec, "model.layers."));
  EXPECT_FALSE(IsIgnorableTensor(spec, "lm_head.weight"));
  spec.tie_word_embeddings = true;
  EXPECT_TRUE(IsIgnorableTensor(spec, "lm_head.weight"));
}

TEST(GenerationConfig, ReadsSuggestions) {
  const auto defaults = ParseGenerationConfig(
      R"({"eos_token_id": [2, 5], "do_sample": true, "temperature": 0.6, "top_k": 20,
          "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1, "transformers_version": "5"})",
      "generation_config.json", 259);
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  EXPECT_THAT(defaults->eos_token_ids, ElementsAre(2, 5));
  EXPECT_EQ(defaults->do_sample, true);
  EXPECT_EQ(defaults->temperature, 0.6);
  EXPECT_EQ(defaults->top_k, 20);
  EXPECT_EQ(defaults->top_p, 0.95);
  EXPECT_EQ(defaults->min_p, 0.0);
  EXPECT_EQ(defaults->repetition_penalty, 1.1);
}

TEST(GenerationConfig, ListsProblems) {
  const auto defaults = ParseGenerationConfig(
      R"({"eos_token_id": 259, "do_sample": "yes", "temperature": -1, "top_k": 1.5, "top_p": 2})",
      "generation_config.json", 259);
  ASSERT_FALSE(defaults.ok());
  EXPECT_THAT(std::string(defaults.status().message()),
              AllOf(HasSubstr("generation_config.json has 5 problems"),
                    HasSubstr("259 is outside the vocabulary"),
                    HasSubstr("do_sample: expected true or false"), HasSubstr("temperature: is -1"),
                    HasSubstr("top_k: expected a whole number"), HasSubstr("top_p: is 2")));
}

}  // namespace
}  // namespace heddle
