// A model family as data: what a checkpoint's config.json or GGUF metadata says, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"
#include "runtime/model/rope_spec.h"

namespace heddle {

// More layers than any real model has, few enough to name every tensor of.
inline constexpr int64_t kMaxLayers = 4096;

// Invariants once parsed: every size is positive, total_query_heads is a multiple of
// total_kv_heads, windows has num_layers entries, no product of two sizes overflows.
struct ModelSpec {
  std::string model_type;  // "llama", "mistral", "qwen2" or "qwen3"

  int64_t vocab_size = 0;  // rows of the embedding; may exceed what the tokenizer knows
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t total_query_heads = 0;
  int64_t total_kv_heads = 0;
  int64_t head_dim = 0;  // total_query_heads * head_dim need not be hidden_size
  double rms_norm_epsilon = 1e-6;

  bool tie_word_embeddings = false;  // the head is the embedding, no tensor of its own
  bool qkv_bias = false;
  bool output_bias = false;  // of o_proj
  bool mlp_bias = false;
  bool qk_norm = false;  // an RMS norm over each query and key head before RoPE

  RopeSpec rope;
  int64_t max_position_embeddings = 0;
  std::vector<int64_t> windows;  // [num_layers] tokens a query sees, itself included; 0 = all

  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;
  DType stored_dtype = DType::kFloat32;  // as the config declares it; tensors may differ
};

// The longest sequence that makes sense: scaled rotary embeddings reach `factor` times beyond the
// length that the model was trained at.
int64_t MaxContextLength(const ModelSpec& spec);

// Parses a Hugging Face config.json. Every problem is listed in one InvalidArgument error;
// `file_name` is named in it.
absl::StatusOr<ModelSpec> ParseModelConfig(absl::string_view json, absl::string_view file_name);

// What is wrong with the numbers of a spec, one line each under the config.json's key; empty if
// its invariants hold. Parsers of every format end with this.
std::vector<std::string> FindSpecProblems(const ModelSpec& spec);

// A weight the model cannot run without, under its Hugging Face name.
struct ExpectedTensor {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // [out, in] or [size]
};

// In the order of the forward pass: embedding, layers, final norm, head (unless tied).
std::vector<ExpectedTensor> ExpectedTensors(const ModelSpec& spec);

// Whether a checkpoint of this model may carry `name` although nothing reads it: rotary_emb
// buffers, layers past num_layers (multi-token prediction), a head beside tied embeddings.
bool IsIgnorableTensor(const ModelSpec& spec, absl::string_view name);

}  // namespace heddle
