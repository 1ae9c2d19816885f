// A model family as data: what a checkpoint's config.json or GGUF metadata says, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"
#include "runtime/model/mla_spec.h"
#include "runtime/model/moe_spec.h"
#include "runtime/model/rope_spec.h"

namespace heddle {

// More layers than any real model has, few enough to name every tensor of.
inline constexpr int64_t kMaxLayers = 4096;
// Bounds that no real model comes near and under which no product of two sizes overflows.
inline constexpr int64_t kMaxWidth = int64_t{1} << 22;
inline constexpr int64_t kMaxHeads = int64_t{1} << 14;
inline constexpr int64_t kMaxHeadDim = int64_t{1} << 12;

// Weights stored as float8 E4M3 with a tensor of floats NAME_scale_inv beside tensor NAME:
// element (row, column) is multiplied by scale_inv[row / block_rows, column / block_columns].
// The last blocks of a matrix may be short.
struct BlockFp8Spec {
  int64_t block_rows = 0;
  int64_t block_columns = 0;
};

// Invariants once parsed: every size is positive, total_query_heads is a multiple of
// total_kv_heads, windows has num_layers entries, no product of two sizes overflows.
struct ModelSpec {
  std::string model_type;  // "llama", "qwen3", "deepseek_v2", …; ParseModelConfig names all

  int64_t vocab_size = 0;  // rows of the embedding; may exceed what the tokenizer knows
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;  // of the layers without experts
  int64_t num_layers = 0;
  int64_t total_query_heads = 0;
  int64_t total_kv_heads = 0;  // 1 for MLA: all heads read one latent
  // total_query_heads * head_dim need not be hidden_size. For MLA qk_nope_head_dim +
  // qk_rope_head_dim.
  int64_t head_dim = 0;
  double rms_norm_epsilon = 1e-6;

  bool tie_word_embeddings = false;  // the head is the embedding, no tensor of its own
  bool qkv_bias = false;             // for MLA of q_a_proj and kv_a_proj_with_mqa
  bool output_bias = false;          // of o_proj
  bool mlp_bias = false;
  bool qk_norm = false;  // an RMS norm over each query and key head before RoPE

  RopeSpec rope;
  int64_t max_position_embeddings = 0;
  std::vector<int64_t> windows;  // [num_layers] tokens a query sees, itself included; 0 = all

  std::optional<MlaSpec> mla;  // absent: grouped-query attention
  std::optional<MoeSpec> moe;  // absent: every layer is dense

  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;
  DType stored_dtype = DType::kFloat32;  // as the config declares it; tensors may differ
  std::optional<BlockFp8Spec> block_fp8;
};

// Whether the FFN of `layer` is a mixture of experts.
bool HasExperts(const ModelSpec& spec, int64_t layer);

// What the product of a query and a key is multiplied by before the softmax: head_dim^-1/2, and for
// MLA YaRN's factor of rope_spec.h.
double AttentionScale(const ModelSpec& spec);

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

// In the order of the forward pass: embedding, layers, final norm, head (unless tied). Scales of
// block-fp8 weights are not among them: which matrices have some, their stored type says.
std::vector<ExpectedTensor> ExpectedTensors(const ModelSpec& spec);

// Whether a checkpoint of this model may carry `name` although nothing reads it: rotary_emb
// buffers, layers past num_layers (multi-token prediction), a head beside tied embeddings.
bool IsIgnorableTensor(const ModelSpec& spec, absl::string_view name);

}  // namespace heddle
