#include "runtime/checkpoint/gguf_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "runtime/model/problem_list.h"

namespace heddle {
namespace {

constexpr absl::string_view kRopeFreqs = "rope_freqs.weight";

struct NamePair {
  absl::string_view gguf;
  absl::string_view hugging_face;
};

constexpr NamePair kOutsideLayers[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
};

constexpr NamePair kInsideLayer[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
    {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"},
    {"attn_output", "self_attn.o_proj"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
};

// Replaces the part of "PART.weight" or "PART.bias" that one of `pairs` knows.
template <size_t N>
std::string Rename(const NamePair (&pairs)[N], absl::string_view name) {
  const size_t dot = name.find('.');
  for (const NamePair& pair : pairs) {
    if (name.substr(0, dot) == pair.gguf && dot != absl::string_view::npos) {
      return absl::StrCat(pair.hugging_face, name.substr(dot));
    }
  }
  return std::string(name);
}

const StoredTensor* FindTensor(const GgufFile& file, absl::string_view name) {
  const auto it =
      absl::c_find_if(file.tensors, [&](const StoredTensor& t) { return t.name == name; });
  return it == file.tensors.end() ? nullptr : &*it;
}

// Typed metadata, with every problem kept. A value of the wrong type reads as absent.
class MetadataReader {
 public:
  MetadataReader(const GgufFile& file, std::vector<std::string>& problems)
      : file_(file), problems_(problems) {}

  void AddProblem(absl::string_view key, absl::string_view text) const {
    problems_.push_back(absl::StrCat(key, ": ", text));
  }

  std::optional<int64_t> Integer(absl::string_view key) const {
    return Read(key, &GgufValue::Integer, "a whole number");
  }
  std::optional<double> Number(absl::string_view key) const {
    return Read(key, &GgufValue::Number, "a number");
  }
  std::optional<bool> Bool(absl::string_view key) const {
    return Read(key, &GgufValue::Bool, "true or false");
  }
  std::string String(absl::string_view key) const {
    return std::string(Read(key, &GgufValue::String, "a string").value_or(""));
  }
  std::vector<std::string> Strings(absl::string_view key) const {
    const auto views = Read(key, &GgufValue::Strings, "a list of strings");
    if (!views) return {};
    return {views->begin(), views->end()};
  }
  std::vector<float> Floats(absl::string_view key) const {
    return Read(key, &GgufValue::Floats, "a list of floating-point numbers")
        .value_or(std::vector<float>());
  }
  std::vector<int64_t> Integers(absl::string_view key) const {
    return Read(key, &GgufValue::Integers, "a list of whole numbers")
        .value_or(std::vector<int64_t>());
  }

  // Some files give one number a layer; they must agree.
  std::optional<int64_t> IntegerOfLayers(absl::string_view key) const {
    const GgufValue* value = Find(key);
    if (value == nullptr) return std::nullopt;
    const std::optional<std::vector<int64_t>> layers = value->Integers();
    if (!layers) return Integer(key);
    if (!layers->empty() &&
        absl::c_all_of(*layers, [&](int64_t n) { return n == layers->front(); })) {
      return layers->front();
    }
    AddProblem(key, "layers of different shapes are not supported");
    return std::nullopt;
  }

  int64_t Required(absl::string_view key, std::optional<int64_t> value) const {
    if (Find(key) == nullptr) AddProblem(key, "missing");
    return value.value_or(0);
  }

 private:
  const GgufValue* Find(absl::string_view key) const {
    const auto it = file_.metadata.find(key);
    return it == file_.metadata.end() ? nullptr : &it->second;
  }

  template <typename T>
  std::optional<T> Read(absl::string_view key, std::optional<T> (GgufValue::*accessor)() const,
                        absl::string_view expected) const {
    const GgufValue* value = Find(key);
    if (value == nullptr) return std::nullopt;
    std::optional<T> result = (value->*accessor)();
    if (!result)
      AddProblem(key, absl::StrCat("expected ", expected, ", found ", value->TypeName()));
    return result;
  }

  const GgufFile& file_;
  std::vector<std::string>& problems_;
};

void ReadShape(const MetadataReader& metadata, const std::string& arch, const GgufFile& file,
               ModelSpec& spec) {
  const auto required = [&](absl::string_view name) {
    const std::string key = absl::StrCat(arch, ".", name);
    return metadata.Required(key, metadata.IntegerOfLayers(key));
  };
  spec.hidden_size = required("embedding_length");
  spec.intermediate_size = required("feed_forward_length");
  spec.num_layers = required("block_count");
  spec.total_query_heads = required("attention.head_count");
  spec.total_kv_heads = metadata.IntegerOfLayers(absl::StrCat(arch, ".attention.head_count_kv"))
                            .value_or(spec.total_query_heads);
  spec.max_position_embeddings = required("context_length");

  // Without a key of its own the vocabulary is as large as its embedding.
  const StoredTensor* embedding = FindTensor(file, "token_embd.weight");
  spec.vocab_size = metadata.Integer(absl::StrCat(arch, ".vocab_size"))
                        .value_or(embedding == nullptr ? 0 : embedding->shape.front());

  const std::string key_length = absl::StrCat(arch, ".attention.key_length");
  if (const auto length = metadata.Integer(key_length)) {
    spec.head_dim = *length;
  } else if (spec.total_query_heads > 0) {
    spec.head_dim = spec.hidden_size / spec.total_query_heads;
    if (spec.hidden_size % spec.total_query_heads != 0) {
      metadata.AddProblem(key_length, "missing, and the heads do not divide embedding_length");
    }
  }
  const std::string value_length = absl::StrCat(arch, ".attention.value_length");
  if (metadata.Integer(value_length).value_or(spec.head_dim) != spec.head_dim) {
    metadata.AddProblem(value_length, "must equal attention.key_length");
  }
}

void ReadRopeScaling(const MetadataReader& metadata, const std::string& arch, ModelSpec& spec) {
  RopeSpec& rope = spec.rope;
  const std::string prefix = absl::StrCat(arch, ".rope.scaling.");
  std::string type = metadata.String(prefix + "type");
  // A factor of 0 says that there is none; scale_linear is the older spelling.
  double factor = metadata.Number(prefix + "factor").value_or(0.0);
  if (factor == 0.0) factor = metadata.Number(arch + ".rope.scale_linear").value_or(0.0);
  if (type.empty()) type = factor == 0.0 ? "none" : "linear";

  if (type == "none") return;
  if (type != "linear" && type != "yarn") {
    metadata.AddProblem(prefix + "type", absl::StrCat("unknown type \"", type,
                                                      "\"; supported are none, linear, yarn"));
    return;
  }
  rope.scaling = type == "yarn" ? RopeSpec::Scaling::kYarn : RopeSpec::Scaling::kLinear;
  rope.factor = factor == 0.0 ? 1.0 : factor;
  if (rope.scaling == RopeSpec::Scaling::kLinear) return;

  rope.original_max_position_embeddings =
      metadata.Integer(prefix + "original_context_length").value_or(spec.max_position_embeddings);
  rope.beta_fast = metadata.Number(prefix + "yarn_beta_fast").value_or(rope.beta_fast);
  rope.beta_slow = metadata.Number(prefix + "yarn_beta_slow").value_or(rope.beta_slow);
  if (metadata.Number(prefix + "yarn_ext_factor").value_or(1.0) != 1.0) {
    metadata.AddProblem(prefix + "yarn_ext_factor", "only 1 is supported");
  }
  // GGUF's factor multiplies the usual one.
  if (const auto multiplier = metadata.Number(prefix + "attn_factor")) {
    rope.attention_factor = *multiplier * AttentionFactor(rope);
  }
}

void ReadRope(const MetadataReader& metadata, const std::string& arch, const GgufFile& file,
              absl::string_view contents, ModelSpec& spec) {
  RopeSpec& rope = spec.rope;
  rope.interleaved = arch == "llama";
  rope.theta = metadata.Number(arch + ".rope.freq_base").value_or(rope.theta);
  const std::string dimension_count = arch + ".rope.dimension_count";
  rope.rotary_dim = metadata.Integer(dimension_count).value_or(spec.head_dim);
  if (rope.rotary_dim != spec.head_dim) {
    metadata.AddProblem(dimension_count,
                        absl::StrCat("is ", rope.rotary_dim,
                                     "; these families rotate whole heads of ", spec.head_dim));
  }
  ReadRopeScaling(metadata, arch, spec);

  const StoredTensor* factors = FindTensor(file, kRopeFreqs);
  if (factors == nullptr) return;
  const int64_t num_factors = rope.rotary_dim / 2;
  if (num_factors < 1 || factors->dtype != DType::kFloat32 ||
      factors->shape != std::vector<int64_t>{num_factors}) {
    metadata.AddProblem(kRopeFreqs,
                        absl::StrCat("expected F32 [", num_factors, "], found ", factors->type_name,
                                     " ", ShapeName(factors->shape)));
    return;
  }
  rope.frequency_factors.resize(num_factors);
  std::memcpy(rope.frequency_factors.data(), contents.data() + factors->offset, factors->bytes);
  if (!absl::c_all_of(rope.frequency_factors,
                      [](float factor) { return factor > 0.0f && std::isfinite(factor); })) {
    metadata.AddProblem(kRopeFreqs, "a factor is not a positive number");
  }
}

std::optional<int32_t> ReadTokenId(const MetadataReader& metadata, absl::string_view key) {
  const std::optional<int64_t> id = metadata.Integer(key);
  if (!id) return std::nullopt;
  if (*id >= 0 && *id <= std::numeric_limits<int32_t>::max()) return static_cast<int32_t>(*id);
  metadata.AddProblem(key, absl::StrCat(*id, " is no token id"));
  return std::nullopt;
}

}  // namespace

std::string HuggingFaceName(absl::string_view gguf_name) {
  absl::string_view rest = gguf_name;
  if (!absl::ConsumePrefix(&rest, "blk.")) return Rename(kOutsideLayers, gguf_name);
  const size_t dot = rest.find('.');
  if (dot == absl::string_view::npos) return std::string(gguf_name);
  return absl::StrCat("model.layers.", rest.substr(0, dot), ".",
                      Rename(kInsideLayer, rest.substr(dot + 1)));
}

absl::StatusOr<ModelSpec> GgufModelSpec(const GgufFile& file, absl::string_view contents,
                                        absl::string_view file_name) {
  std::vector<std::string> problems;
  const MetadataReader metadata(file, problems);

  const std::string arch = metadata.String("general.architecture");
  constexpr absl::string_view kArchitectures[] = {"llama", "qwen2", "qwen3"};
  if (!absl::c_linear_search(kArchitectures, arch)) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": general.architecture \"", arch,
                                                   "\" is not supported; supported are ",
                                                   absl::StrJoin(kArchitectures, ", ")));
  }
  if (metadata.Integer("split.count").value_or(1) > 1) {
    metadata.AddProblem("split.count", "a model split over files is not supported; merge it");
  }
  if (metadata.Integer(arch + ".expert_count").value_or(0) > 0) {
    metadata.AddProblem(arch + ".expert_count", "mixtures of experts are not supported");
  }

  ModelSpec spec;
  spec.model_type = arch;
  ReadShape(metadata, arch, file, spec);
  const bool shape_known = problems.empty();
  const std::string epsilon = arch + ".attention.layer_norm_rms_epsilon";
  if (const auto value = metadata.Number(epsilon)) {
    spec.rms_norm_epsilon = *value;
  } else if (!file.metadata.contains(epsilon)) {
    metadata.AddProblem(epsilon, "missing");
  }
  ReadRope(metadata, arch, file, contents, spec);

  const int64_t window = metadata.Integer(arch + ".attention.sliding_window").value_or(0);
  spec.windows.assign(std::clamp<int64_t>(spec.num_layers, 0, kMaxLayers), window);
  spec.tie_word_embeddings = FindTensor(file, "output.weight") == nullptr;
  spec.qk_norm = arch == "qwen3";
  spec.qkv_bias = arch == "qwen2" || FindTensor(file, "blk.0.attn_q.bias") != nullptr;
  spec.output_bias = FindTensor(file, "blk.0.attn_output.bias") != nullptr;
  spec.mlp_bias = FindTensor(file, "blk.0.ffn_gate.bias") != nullptr;
  if (const StoredTensor* query = FindTensor(file, "blk.0.attn_q.weight")) {
    spec.stored_dtype = *query->dtype;
  }
  for (const absl::string_view key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    const std::optional<int32_t> id = ReadTokenId(metadata, key);
    if (id && !absl::c_linear_search(spec.eos_token_ids, *id)) spec.eos_token_ids.push_back(*id);
  }
  spec.bos_token_id = ReadTokenId(metadata, "tokenizer.ggml.bos_token_id");

  if (shape_known) {
    for (std::string& problem : FindSpecProblems(spec)) problems.push_back(std::move(problem));
  }
  RETURN_IF_ERROR(ProblemsToStatus(file_name, problems));
  return spec;
}

absl::StatusOr<GgufVocabulary> ReadGgufVocabulary(const GgufFile& file,
                                                  absl::string_view file_name) {
  std::vector<std::string> problems;
  const MetadataReader metadata(file, problems);
  GgufVocabulary vocabulary;
  vocabulary.model = metadata.String("tokenizer.ggml.model");
  vocabulary.pre = metadata.String("tokenizer.ggml.pre");
  vocabulary.tokens = metadata.Strings("tokenizer.ggml.tokens");
  vocabulary.scores = metadata.Floats("tokenizer.ggml.scores");
  vocabulary.merges = metadata.Strings("tokenizer.ggml.merges");
  for (const int64_t type : metadata.Integers("tokenizer.ggml.token_type")) {
    if (std::in_range<int32_t>(type)) {
      vocabulary.token_types.push_back(static_cast<int32_t>(type));
    } else {
      metadata.AddProblem("tokenizer.ggml.token_type", absl::StrCat(type, " is no token type"));
    }
  }
  vocabulary.bos_id = ReadTokenId(metadata, "tokenizer.ggml.bos_token_id");
  vocabulary.eos_id = ReadTokenId(metadata, "tokenizer.ggml.eos_token_id");
  vocabulary.eot_id = ReadTokenId(metadata, "tokenizer.ggml.eot_token_id");
  vocabulary.unknown_id = ReadTokenId(metadata, "tokenizer.ggml.unknown_token_id");
  vocabulary.add_bos = metadata.Bool("tokenizer.ggml.add_bos_token");
  vocabulary.add_eos = metadata.Bool("tokenizer.ggml.add_eos_token");
  vocabulary.add_space_prefix = metadata.Bool("tokenizer.ggml.add_space_prefix");
  RETURN_IF_ERROR(ProblemsToStatus(file_name, problems));
  return vocabulary;
}

}  // namespace heddle
