// One rank's weights, packed in device memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/gemm/packed_weight.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"
#include "runtime/shard_layout.h"

namespace heddle {

struct Projection {
  PackedWeight weight;          // [out, in]
  const float* bias = nullptr;  // [out], or null
};

// A gated feed-forward block.
struct DenseFfnWeights {
  Projection gate;  // [columns, hidden]
  Projection up;    // [columns, hidden]
  Projection down;  // [hidden, columns]
};

// A mixture of experts: columns of every expert, or whole experts. The stacks name the shape of an
// expert even where none is held.
struct MoeWeights {
  PackedWeight router;                     // [total experts, hidden], on every rank
  const float* correction_bias = nullptr;  // [total experts], or null
  Range experts;                           // global ids of those held
  PackedWeightStack gate;                  // [experts] of [columns, hidden]
  PackedWeightStack up;                    // [experts] of [columns, hidden]
  PackedWeightStack down;                  // [experts] of [hidden, columns]
  DenseFfnWeights shared;                  // of all shared experts together, if there are any
};

// Rows and columns of every matrix below are the rank's own shares. `o` and the FFN's `down` give
// partial sums over the ranks; their biases are on rank 0 alone, so that they are added once. With
// data-parallel attention every rank has all heads and the bias of `o`.
struct GqaWeights {
  Projection q;                   // [query_heads * head_dim, hidden]
  Projection k;                   // [kv_heads * head_dim, hidden]
  Projection v;                   // [kv_heads * head_dim, hidden]
  const float* q_norm = nullptr;  // [head_dim], or null
  const float* k_norm = nullptr;  // [head_dim], or null
  Projection o;                   // [hidden, query_heads * head_dim]
};

// kv_b is held twice: as it expands latents to keys and values, and as absorbed decode multiplies
// queries and outputs by it (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
struct MlaWeights {
  Projection q_a;                    // [q_lora_rank, hidden] on every rank; none if that is 0
  const float* q_a_norm = nullptr;   // [q_lora_rank], or null
  Projection q_b;                    // [query_heads * head_dim, q_lora_rank, or hidden without]
  Projection kv_a;                   // [kv_lora_rank + qk_rope_head_dim, hidden] on every rank
  const float* kv_a_norm = nullptr;  // [kv_lora_rank]
  PackedWeight kv_b;             // [query_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]
  PackedWeightStack absorbed_k;  // [query_heads] of W_UK^T [kv_lora_rank, qk_nope_head_dim]
  PackedWeightStack absorbed_v;  // [query_heads] of W_UV [v_head_dim, kv_lora_rank]
  Projection o;                  // [hidden, query_heads * v_head_dim]
};

// Pointers into ModelWeights::buffers.
struct LayerWeights {
  const float* attention_norm = nullptr;  // [hidden]
  std::variant<GqaWeights, MlaWeights> attention;
  const float* ffn_norm = nullptr;  // [hidden]
  std::variant<DenseFfnWeights, MoeWeights> ffn;
};

// Owned by the rank's worker; must not outlive the backend. Immutable once loaded.
struct ModelWeights {
  PackedWeight embedding;  // [local_vocab, hidden]
  std::vector<LayerWeights> layers;
  const float* final_norm = nullptr;  // [hidden]
  PackedWeight head;                  // [local_vocab, hidden]; the embedding itself when tied
  std::vector<DeviceBuffer> buffers;
  int64_t bytes = 0;  // used of the buffers
};

struct WeightLoadOptions {
  std::optional<DType> dtype = std::nullopt;  // of plain matrices; unset: as in the checkpoint
  // Called after each tensor of this rank.
  std::function<void(absl::string_view tensor)> on_progress = nullptr;
};

// Reads this rank's slices tensor by tensor: the source's memory never holds more than one of them.
// Errors name the tensor.
absl::StatusOr<ModelWeights> LoadWeights(const ModelSpec& spec, const ShardLayout& layout, int rank,
                                         WeightSource& source, const WeightLoadOptions& options,
                                         Backend& backend, Stream& stream);

}  // namespace heddle
