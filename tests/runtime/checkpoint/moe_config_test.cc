// config.json of models with latent attention or experts.
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/model/model_spec.h"
#include "runtime/model/tensor_names.h"
#include "tests/runtime/checkpoint/parse_config.h"

namespace heddle {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

json Yarn(double magnitude) {
  return {{"type", "yarn"},
          {"factor", 40},
          {"original_max_position_embeddings", 4096},
          {"beta_fast", 32},
          {"beta_slow", 1},
          {"mscale", magnitude},
          {"mscale_all_dim", magnitude}};
}

// DeepSeek-V2-Lite's config.json with fewer layers, without the keys that matter to training only.
json V2Lite() {
  return {{"model_type", "deepseek_v2"},
          {"vocab_size", 102400},
          {"hidden_size", 2048},
          {"intermediate_size", 10944},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 16},
          {"num_key_value_heads", 16},
          {"max_position_embeddings", 163840},
          {"q_lora_rank", nullptr},
          {"kv_lora_rank", 512},
          {"qk_nope_head_dim", 128},
          {"qk_rope_head_dim", 64},
          {"v_head_dim", 128},
          {"n_routed_experts", 64},
          {"n_shared_experts", 2},
          {"num_experts_per_tok", 6},
          {"moe_intermediate_size", 1408},
          {"moe_layer_freq", 1},
          {"first_k_dense_replace", 1},
          {"n_group", 1},
          {"topk_group", 1},
          {"topk_method", "greedy"},
          {"scoring_func", "softmax"},
          {"norm_topk_prob", false},
          {"routed_scaling_factor", 1.0},
          {"rope_theta", 10000},
          {"rope_scaling", Yarn(0.707)}};
}

// DeepSeek-V3's, likewise.
json V3() {
  json config = V2Lite();
  config.update({{"model_type", "deepseek_v3"},
                 {"hidden_size", 7168},
                 {"num_attention_heads", 128},
                 {"num_key_value_heads", 128},
                 {"num_hidden_layers", 5},
                 {"q_lora_rank", 1536},
                 {"n_routed_experts", 256},
                 {"n_shared_experts", 1},
                 {"num_experts_per_tok", 8},
                 {"moe_intermediate_size", 2048},
                 {"first_k_dense_replace", 3},
                 {"n_group", 8},
                 {"topk_group", 4},
                 {"topk_method", "noaux_tc"},
                 {"scoring_func", "sigmoid"},
                 {"norm_topk_prob", true},
                 {"routed_scaling_factor", 2.5},
                 {"num_nextn_predict_layers", 1},
                 {"rope_scaling", Yarn(1.0)},
                 {"quantization_config",
                  {{"activation_scheme", "dynamic"},
                   {"fmt", "e4m3"},
                   {"quant_method", "fp8"},
                   {"weight_block_size", {128, 128}}}}});
  return config;
}

json Mixtral() {
  return {{"model_type", "mixtral"},  {"vocab_size", 32000},
          {"hidden_size", 4096},      {"intermediate_size", 14336},
          {"num_hidden_layers", 2},   {"num_attention_heads", 32},
          {"num_key_value_heads", 8}, {"max_position_embeddings", 32768},
          {"num_local_experts", 8},   {"num_experts_per_tok", 2},
          {"sliding_window", nullptr}};
}

json Qwen3Moe() {
  return {{"model_type", "qwen3_moe"},
          {"vocab_size", 151936},
          {"hidden_size", 2048},
          {"intermediate_size", 6144},
          {"num_hidden_layers", 6},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 4},
          {"max_position_embeddings", 40960},
          {"head_dim", 128},
          {"num_experts", 128},
          {"num_experts_per_tok", 8},
          {"moe_intermediate_size", 768},
          {"norm_topk_prob", true},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", json::array()}};
}

json Without(json config, absl::string_view key) {
  config.erase(std::string(key));
  return config;
}

// [out, in] of a tensor; {} if the model has none of this name.
std::vector<int64_t> ShapeOf(const ModelSpec& spec, absl::string_view name) {
  for (const ExpectedTensor& tensor : ExpectedTensors(spec)) {
    if (tensor.name == name) return tensor.shape;
  }
  return {};
}

TEST(MoeConfig, DeepSeekV2Lite) {
  const ModelSpec spec = Parse(V2Lite());
  ASSERT_TRUE(spec.mla && spec.moe);
  EXPECT_EQ(spec.total_kv_heads, 1);
  EXPECT_EQ(spec.head_dim, 192);
  EXPECT_EQ(spec.mla->q_lora_rank, 0);
  EXPECT_EQ(spec.mla->kv_lora_rank, 512);
  EXPECT_EQ(spec.mla->qk_nope_head_dim, 128);
  EXPECT_EQ(spec.mla->qk_rope_head_dim, 64);
  EXPECT_EQ(spec.mla->v_head_dim, 128);
  EXPECT_EQ(spec.rope.rotary_dim, 64);
  EXPECT_TRUE(spec.rope.interleaved);
  EXPECT_FALSE(spec.block_fp8.has_value());

  const MoeSpec& moe = *spec.moe;
  EXPECT_EQ(moe.num_experts, 64);
  EXPECT_EQ(moe.num_experts_per_token, 6);
  EXPECT_EQ(moe.expert_intermediate_size, 1408);
  EXPECT_EQ(moe.shared_intermediate_size, 2816);
  EXPECT_THAT(moe.layers, ElementsAre(false, true, true));
  EXPECT_EQ(moe.score, RouterScore::kSoftmax);
  EXPECT_EQ(moe.num_groups, 1);
  EXPECT_FALSE(moe.correction_bias || moe.normalise_weights);
  EXPECT_EQ(moe.routed_scaling_factor, 1.0);
  EXPECT_FALSE(HasExperts(spec, 0));
  EXPECT_TRUE(HasExperts(spec, 1));
}

TEST(MoeConfig, DeepSeekV2GroupLimited) {
  const ModelSpec spec = Parse(With(V2Lite(), {{"topk_method", "group_limited_greedy"},
                                               {"n_group", 8},
                                               {"topk_group", 3},
                                               {"routed_scaling_factor", 16.0}}));
  EXPECT_EQ(spec.moe->num_groups, 8);
  EXPECT_EQ(spec.moe->num_top_groups, 3);
  EXPECT_EQ(spec.moe->group_score, GroupScore::kMax);
  EXPECT_EQ(spec.moe->routed_scaling_factor, 16.0);
  // A greedy choice knows no groups.
  EXPECT_EQ(Parse(With(V2Lite(), {{"n_group", 8}, {"topk_group", 3}})).moe->num_groups, 1);
  EXPECT_EQ(Parse(With(V2Lite(), {{"n_group", nullptr}})).moe->num_groups, 1);
}

TEST(MoeConfig, DeepSeekV3AndKimiK2) {
  for (const char* model_type : {"deepseek_v3", "kimi_k2"}) {
    const ModelSpec spec = Parse(With(V3(), {{"model_type", model_type}}));
    ASSERT_TRUE(spec.mla && spec.moe);
    EXPECT_EQ(spec.mla->q_lora_rank, 1536);
    EXPECT_THAT(spec.moe->layers, ElementsAre(false, false, false, true, true));
    EXPECT_EQ(spec.moe->score, RouterScore::kSigmoid);
    EXPECT_TRUE(spec.moe->correction_bias);
    EXPECT_EQ(spec.moe->num_groups, 8);
    EXPECT_EQ(spec.moe->num_top_groups, 4);
    EXPECT_EQ(spec.moe->group_score, GroupScore::kTopTwoSum);
    EXPECT_TRUE(spec.moe->normalise_weights);
    EXPECT_EQ(spec.moe->routed_scaling_factor, 2.5);
    EXPECT_EQ(spec.moe->shared_intermediate_size, 2048);
    ASSERT_TRUE(spec.block_fp8.has_value());
    EXPECT_EQ(spec.block_fp8->block_rows, 128);
    EXPECT_EQ(spec.block_fp8->block_columns, 128);
  }
  EXPECT_FALSE(Parse(With(V3(), {{"norm_topk_prob", false}})).moe->normalise_weights);
  EXPECT_FALSE(Parse(With(V3(), {{"rope_interleave", false}})).rope.interleaved);
}

TEST(MoeConfig, Mixtral) {
  const ModelSpec spec = Parse(Mixtral());
  ASSERT_TRUE(spec.moe.has_value());
  EXPECT_FALSE(spec.mla.has_value());
  EXPECT_EQ(spec.head_dim, 128);
  EXPECT_EQ(spec.moe->num_experts, 8);
  EXPECT_EQ(spec.moe->num_experts_per_token, 2);
  EXPECT_EQ(spec.moe->expert_intermediate_size, 14336);
  EXPECT_EQ(spec.moe->shared_intermediate_size, 0);
  EXPECT_THAT(spec.moe->layers, Each(true));
  EXPECT_TRUE(spec.moe->normalise_weights);
  EXPECT_EQ(spec.moe->score, RouterScore::kSoftmax);
  // Mixtral's defaults are its own.
  EXPECT_EQ(spec.rope.theta, 1e6);
  EXPECT_EQ(spec.rms_norm_epsilon, 1e-5);
  EXPECT_THAT(spec.windows, Each(0));
  EXPECT_THAT(Parse(Without(Mixtral(), "sliding_window")).windows, Each(0));
  EXPECT_THAT(Parse(With(Mixtral(), {{"sliding_window", 4}})).windows, Each(4));
}

TEST(MoeConfig, Qwen3Moe) {
  const ModelSpec spec = Parse(Qwen3Moe());
  ASSERT_TRUE(spec.moe.has_value());
  EXPECT_TRUE(spec.qk_norm);
  EXPECT_EQ(spec.moe->num_experts, 128);
  EXPECT_EQ(spec.moe->expert_intermediate_size, 768);
  EXPECT_TRUE(spec.moe->normalise_weights);
  EXPECT_THAT(spec.moe->layers, Each(true));
  EXPECT_FALSE(Parse(Without(Qwen3Moe(), "norm_topk_prob")).moe->normalise_weights);
  // Without head_dim its heads share hidden_size; Qwen3's have a width of their own.
  EXPECT_EQ(Parse(Without(Qwen3Moe(), "head_dim")).head_dim, 64);

  EXPECT_THAT(
      Parse(With(Qwen3Moe(), {{"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}})).moe->layers,
      ElementsAre(false, true, false, false, false, true));
  // No layer left: a dense model.
  EXPECT_FALSE(Parse(With(Qwen3Moe(), {{"decoder_sparse_step", 7}})).moe.has_value());

  json renamed = Without(Qwen3Moe(), "num_experts");
  EXPECT_THAT(Error(renamed), HasSubstr("num_experts: missing"));
  renamed["num_local_experts"] = 16;
  EXPECT_EQ(Parse(renamed).moe->num_experts, 16);
}

TEST(MoeConfig, LayersWithExperts) {
  EXPECT_THAT(Parse(With(V3(), {{"first_k_dense_replace", 1}, {"moe_layer_freq", 2}})).moe->layers,
              ElementsAre(false, false, true, false, true));
  EXPECT_FALSE(Parse(With(V3(), {{"first_k_dense_replace", 5}})).moe.has_value());
  EXPECT_THAT(Error(With(V3(), {{"moe_layer_freq", 0}})), HasSubstr("moe_layer_freq: is 0"));
  EXPECT_THAT(Error(With(Qwen3Moe(), {{"decoder_sparse_step", 0}})),
              HasSubstr("decoder_sparse_step: is 0"));
}

// One latent, whatever a config counts.
TEST(MoeConfig, KvHeadsOfLatentAttention) {
  for (const json& kv_heads : {json(1), json(16), json(nullptr)}) {
    EXPECT_EQ(Parse(With(V2Lite(), {{"num_key_value_heads", kv_heads}})).total_kv_heads, 1);
  }
  EXPECT_EQ(Parse(Without(V2Lite(), "num_key_value_heads")).total_kv_heads, 1);
  EXPECT_THAT(Error(With(V2Lite(), {{"num_key_value_heads", 4}})),
              AllOf(HasSubstr("num_key_value_heads: is 4"), HasSubstr("num_attention_heads (16)")));
  // transformers writes the rotated part's width, others the whole head's.
  for (const int64_t head_dim : {64, 192}) {
    EXPECT_EQ(Parse(With(V2Lite(), {{"head_dim", head_dim}})).head_dim, 192);
  }
}

// Fault class B4: the squared factor is missing, and hides where the cosines' ratio is 1.
TEST(MoeConfig, YarnScalesTheSoftmax) {
  for (const auto& [magnitude, factor] : {std::pair(0.707, 1.590), std::pair(1.0, 1.874)}) {
    const ModelSpec spec = Parse(With(V2Lite(), {{"rope_scaling", Yarn(magnitude)}}));
    EXPECT_NEAR(SoftmaxScaleFactor(spec.rope), factor, 5e-4);
    EXPECT_NEAR(AttentionScale(spec) * std::sqrt(192.0), factor, 5e-4);
    EXPECT_EQ(AttentionFactor(spec.rope), 1.0);
  }
  json unequal = Yarn(1.0);
  unequal["mscale"] = 0.5;
  const ModelSpec spec = Parse(With(V2Lite(), {{"rope_scaling", unequal}}));
  const double log_factor = std::log(40.0);
  EXPECT_DOUBLE_EQ(AttentionFactor(spec.rope),
                   (0.05 * log_factor + 1.0) / (0.1 * log_factor + 1.0));
  EXPECT_NEAR(SoftmaxScaleFactor(spec.rope), 1.874, 5e-4);
  // Without rotary scaling, and in families whose references have no such factor, there is none.
  EXPECT_DOUBLE_EQ(AttentionScale(Parse(Without(V2Lite(), "rope_scaling"))), 1 / std::sqrt(192.0));
  EXPECT_DOUBLE_EQ(AttentionScale(Parse(With(Mixtral(), {{"rope_scaling", Yarn(1.0)}}))),
                   1 / std::sqrt(128.0));
}

// Fault class B8. DeepSeek's own defaults are mscale 1 and mscale_all_dim 0.
TEST(MoeConfig, MagnitudesComeInPairs) {
  const auto with = [](const json& mscale, const json& mscale_all_dim) {
    json yarn = Yarn(1.0);
    yarn["mscale"] = mscale;
    yarn["mscale_all_dim"] = mscale_all_dim;
    return With(V2Lite(), {{"rope_scaling", yarn}});
  };
  const double plain = 0.1 * std::log(40.0) + 1.0;
  for (const json& config : {with(nullptr, nullptr), with(1.0, 0), with(nullptr, 0)}) {
    EXPECT_DOUBLE_EQ(AttentionFactor(Parse(config).rope), plain);
    EXPECT_EQ(SoftmaxScaleFactor(Parse(config).rope), 1.0);
  }
  for (const json& config : {with(0.707, nullptr), with(nullptr, 0.707), with(0, 0), with(0, 1)}) {
    EXPECT_THAT(Error(config), HasSubstr("rope_scaling.mscale: must be given together"));
  }
  EXPECT_THAT(Error(with(-1, -1)), HasSubstr("mscale is -1"));
  EXPECT_THAT(Error(with(1e300, 1e300)), HasSubstr("mscale_all_dim is 1e+300"));
  EXPECT_THAT(
      Error(With(V2Lite(),
                 {{"rope_scaling", {{"type", "linear"}, {"factor", 2}, {"mscale_all_dim", 1.0}}}})),
      HasSubstr("rope_scaling.mscale_all_dim: has a meaning only"));
}

// Fault class B7.
TEST(MoeConfig, BothSpellingsOfRopeParameters) {
  json renamed = Without(Without(V2Lite(), "rope_scaling"), "rope_theta");
  json parameters = Yarn(0.707);
  parameters["rope_type"] = parameters["type"];
  parameters.erase("type");
  parameters["rope_theta"] = 10000.0;
  renamed["rope_parameters"] = parameters;
  const ModelSpec older = Parse(V2Lite());
  const ModelSpec newer = Parse(renamed);
  EXPECT_EQ(CosSinTable(newer.rope, 200), CosSinTable(older.rope, 200));
  EXPECT_EQ(AttentionScale(newer), AttentionScale(older));
  EXPECT_EQ(newer.rope.interleaved, older.rope.interleaved);
}

TEST(MoeConfig, RefusesWhatNoReferenceDefines) {
  const auto refusal = [](const json& config, absl::string_view key) {
    EXPECT_THAT(Error(config), HasSubstr(absl::StrCat("\n  ", key, ": "))) << key;
  };
  refusal(With(V2Lite(), {{"norm_topk_prob", true}}), "norm_topk_prob");
  refusal(With(V2Lite(), {{"scoring_func", "sigmoid"}}), "scoring_func");
  refusal(With(V2Lite(), {{"topk_method", "noaux_tc"}}), "topk_method");
  refusal(With(V2Lite(), {{"rope_interleave", false}}), "rope_interleave");
  refusal(With(V2Lite(), {{"mlp_bias", true}}), "mlp_bias");
  refusal(With(V3(), {{"scoring_func", "softmax"}}), "scoring_func");
  refusal(With(V3(), {{"topk_method", "greedy"}}), "topk_method");
  refusal(With(V3(), {{"num_experts_per_tok", 1}}), "norm_topk_prob");
  refusal(With(Qwen3Moe(), {{"use_sliding_window", true}}), "use_sliding_window");
  refusal(With(V3(), {{"hidden_act", "gelu"}}), "hidden_act");
  for (const char* unknown : {"deepseek", "deepseek_v32", "kimi_k25", "qwen2_moe", "DeepSeek_V3"}) {
    EXPECT_THAT(Error(With(V3(), {{"model_type", unknown}})),
                AllOf(HasSubstr(unknown), HasSubstr("deepseek_v2, deepseek_v3, kimi_k2")));
  }
}

TEST(MoeConfig, QuantizationOtherThanBlockFp8IsRefused) {
  const auto refusal = [](const json& changes) {
    return Error(With(V3(), {{"quantization_config", With(V3()["quantization_config"], changes)}}));
  };
  EXPECT_THAT(refusal({{"quant_method", "awq"}}), HasSubstr("quantised by \"awq\""));
  EXPECT_THAT(refusal({{"fmt", "e5m2"}}), HasSubstr("quantization_config.fmt: \"e5m2\""));
  EXPECT_THAT(refusal({{"activation_scheme", "static"}}), HasSubstr("activation_scheme"));
  for (const json& block : {json(nullptr), json(128), json({128}), json({128, 128, 128})}) {
    EXPECT_THAT(refusal({{"weight_block_size", block}}),
                HasSubstr("quantization_config.weight_block_size: must list"));
  }
  for (const int64_t size : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_THAT(refusal({{"weight_block_size", {size, 128}}}),
                HasSubstr(absl::StrCat("weight_block_size is ", size)));
    EXPECT_THAT(refusal({{"weight_block_size", {128, size}}}),
                HasSubstr(absl::StrCat("weight_block_size is ", size)));
  }
  const ModelSpec oblong =
      Parse(With(V3(), {{"quantization_config",
                         With(V3()["quantization_config"], {{"weight_block_size", {64, 16}}})}}));
  EXPECT_EQ(oblong.block_fp8->block_rows, 64);
  EXPECT_EQ(oblong.block_fp8->block_columns, 16);
}

TEST(MoeConfig, NamesMissingKeys) {
  for (const char* key :
       {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
        "n_group", "topk_group", "routed_scaling_factor"}) {
    EXPECT_THAT(Error(Without(V3(), key)), HasSubstr(absl::StrCat(key, ": missing")));
  }
  EXPECT_THAT(Error(Without(Mixtral(), "num_local_experts")),
              HasSubstr("num_local_experts: missing"));
  EXPECT_THAT(Error(Without(Mixtral(), "num_key_value_heads")),
              HasSubstr("num_key_value_heads: missing"));
}

TEST(MoeConfig, RefusesSizesThatMakeNoSense) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  for (const char* key :
       {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group"}) {
    for (const int64_t value : {int64_t{0}, int64_t{-8}, huge}) {
      EXPECT_THAT(Error(With(V3(), {{key, value}})), HasSubstr(key)) << value;
    }
  }
  for (const int64_t value : {int64_t{0}, int64_t{-8}, huge, kMaxExperts + 1}) {
    EXPECT_THAT(Error(With(V3(), {{"n_routed_experts", value}})),
                HasSubstr(absl::StrCat("number of experts is ", value)));
  }
  for (const int64_t value : {int64_t{-1}, huge}) {
    EXPECT_THAT(Error(With(V3(), {{"n_shared_experts", value}})), HasSubstr("n_shared_experts"));
  }
  EXPECT_THAT(Error(With(V3(), {{"n_shared_experts", 4096}})),
              HasSubstr("n_shared_experts * moe_intermediate_size is 8388608"));
  for (const double value : {0.0, -1.0}) {
    EXPECT_THAT(Error(With(V3(), {{"routed_scaling_factor", value}})),
                HasSubstr("routed_scaling_factor is"));
  }
  EXPECT_THAT(Error(With(V3(), {{"qk_rope_head_dim", 63}})), HasSubstr("rotary dimension 63"));
  // Enough names to fill memory.
  EXPECT_THAT(Error(With(V3(), {{"num_hidden_layers", 4096}, {"n_routed_experts", 4096}})),
              HasSubstr("more than 131072 in all"));
}

TEST(MoeConfig, RefusesGroupsThatDoNotFit) {
  EXPECT_THAT(Error(With(V3(), {{"n_group", 7}})),
              HasSubstr("(256) must be a multiple of n_group (7)"));
  EXPECT_THAT(Error(With(V3(), {{"topk_group", 9}})), HasSubstr("topk_group is 9"));
  EXPECT_THAT(Error(With(V3(), {{"n_group", 257}})), HasSubstr("n_group is 257"));
  EXPECT_THAT(Error(With(V3(), {{"num_experts_per_tok", 129}})),
              AllOf(HasSubstr("num_experts_per_tok is 129"), HasSubstr("128 experts")));
  EXPECT_THAT(Error(With(V3(), {{"num_experts_per_tok", 257}})),
              HasSubstr("num_experts_per_tok is 257; it must be between 1 and 256"));
  EXPECT_THAT(Error(With(V3(), {{"n_group", 256}, {"topk_group", 16}})),
              HasSubstr("chosen by the best two experts"));
  EXPECT_EQ(Parse(With(V3(), {{"n_group", 128}, {"topk_group", 4}})).moe->num_groups, 128);
}

TEST(MoeTensors, OfDeepSeek) {
  const ModelSpec lite = Parse(V2Lite());
  EXPECT_EQ(ShapeOf(lite, "model.layers.0.self_attn.q_proj.weight"),
            (std::vector<int64_t>{16 * 192, 2048}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
            (std::vector<int64_t>{576, 2048}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.0.self_attn.kv_a_layernorm.weight"),
            (std::vector<int64_t>{512}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.0.self_attn.kv_b_proj.weight"),
            (std::vector<int64_t>{16 * 256, 512}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.0.self_attn.o_proj.weight"),
            (std::vector<int64_t>{2048, 16 * 128}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.0.mlp.up_proj.weight"),
            (std::vector<int64_t>{10944, 2048}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.1.mlp.gate.weight"), (std::vector<int64_t>{64, 2048}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.2.mlp.experts.63.gate_proj.weight"),
            (std::vector<int64_t>{1408, 2048}));
  EXPECT_EQ(ShapeOf(lite, "model.layers.2.mlp.shared_experts.down_proj.weight"),
            (std::vector<int64_t>{2048, 2816}));
  EXPECT_THAT(TensorNames(lite),
              AllOf(Not(Contains("model.layers.0.mlp.gate.weight")),
                    Not(Contains("model.layers.1.mlp.up_proj.weight")),
                    Not(Contains("model.layers.1.mlp.gate.e_score_correction_bias")),
                    Not(Contains("model.layers.1.mlp.experts.64.gate_proj.weight")),
                    Not(Contains("model.layers.0.self_attn.k_proj.weight")),
                    Not(Contains("model.layers.0.self_attn.q_a_proj.weight"))));

  const ModelSpec v3 = Parse(With(V3(), {{"attention_bias", true}}));
  EXPECT_EQ(ShapeOf(v3, "model.layers.0.self_attn.q_b_proj.weight"),
            (std::vector<int64_t>{128 * 192, 1536}));
  EXPECT_THAT(TensorNames(v3), IsSupersetOf({"model.layers.0.self_attn.q_a_proj.weight",
                                             "model.layers.0.self_attn.q_a_proj.bias",
                                             "model.layers.0.self_attn.q_a_layernorm.weight",
                                             "model.layers.0.self_attn.kv_a_proj_with_mqa.bias",
                                             "model.layers.0.self_attn.o_proj.bias",
                                             "model.layers.3.mlp.gate.e_score_correction_bias"}));
  EXPECT_THAT(TensorNames(v3), AllOf(Not(Contains("model.layers.0.self_attn.q_b_proj.bias")),
                                     Not(Contains("model.layers.0.self_attn.kv_b_proj.bias"))));
  // The layer that predicts a token further, with experts of its own.
  EXPECT_TRUE(IsIgnorableTensor(v3, "model.layers.5.mlp.experts.0.up_proj.weight"));
  EXPECT_TRUE(IsIgnorableTensor(v3, "model.layers.5.eh_proj.weight"));
  EXPECT_FALSE(IsIgnorableTensor(v3, "model.layers.4.mlp.experts.256.up_proj.weight"));
}

TEST(MoeTensors, OfMixtralAndQwen) {
  const ModelSpec mixtral = Parse(Mixtral());
  EXPECT_EQ(ShapeOf(mixtral, "model.layers.1.block_sparse_moe.gate.weight"),
            (std::vector<int64_t>{8, 4096}));
  const std::string expert = "model.layers.1.block_sparse_moe.experts.7.";
  EXPECT_EQ(ShapeOf(mixtral, expert + "w1.weight"), (std::vector<int64_t>{14336, 4096}));
  EXPECT_EQ(ShapeOf(mixtral, expert + "w2.weight"), (std::vector<int64_t>{4096, 14336}));
  EXPECT_EQ(ShapeOf(mixtral, expert + "w3.weight"), (std::vector<int64_t>{14336, 4096}));
  EXPECT_EQ(ExpertTensor(mixtral, 1, 7, FfnMatrix::kUp), expert + "w3.weight");
  EXPECT_THAT(TensorNames(mixtral), Each(Not(HasSubstr(".mlp."))));

  const ModelSpec qwen = Parse(With(Qwen3Moe(), {{"mlp_only_layers", {0}}}));
  EXPECT_EQ(ShapeOf(qwen, "model.layers.0.mlp.down_proj.weight"),
            (std::vector<int64_t>{2048, 6144}));
  EXPECT_EQ(ShapeOf(qwen, "model.layers.1.mlp.experts.127.down_proj.weight"),
            (std::vector<int64_t>{2048, 768}));
  EXPECT_THAT(TensorNames(qwen), AllOf(Contains("model.layers.0.self_attn.q_norm.weight"),
                                       Each(Not(HasSubstr("shared_experts")))));
}

// Every caller may rely on the invariants, however a spec came to be.
TEST(MoeSpecs, LayersMustBeThoseOfTheModel) {
  ModelSpec spec = Parse(V3());
  spec.moe->layers.pop_back();
  EXPECT_THAT(FindSpecProblems(spec), Contains(HasSubstr("the model has 5 layers")));
  spec = Parse(V3());
  spec.moe->layers.assign(5, false);
  EXPECT_THAT(FindSpecProblems(spec), Contains(HasSubstr("0 of 5 layers")));
  spec = Parse(V3());
  spec.total_kv_heads = 128;
  EXPECT_THAT(FindSpecProblems(spec), Contains(HasSubstr("one KV head, not 128")));
}

}  // namespace
}  // namespace heddle
