// The Hugging Face names under which every checkpoint offers its tensors.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "runtime/model/model_spec.h"

namespace heddle {

inline constexpr absl::string_view kEmbeddingTensor = "model.embed_tokens.weight";
inline constexpr absl::string_view kFinalNormTensor = "model.norm.weight";
inline constexpr absl::string_view kHeadTensor = "lm_head.weight";

// LayerTensor(0, "self_attn.q_proj.weight")
inline std::string LayerTensor(int64_t layer, absl::string_view suffix) {
  return absl::StrCat("model.layers.", layer, ".", suffix);
}

// The matrices of a gated FFN, down(silu(gate(x)) * up(x)).
enum class FfnMatrix { kGate, kUp, kDown };

// "model.layers.3.mlp.gate.weight", in Mixtral "model.layers.3.block_sparse_moe.gate.weight".
std::string RouterTensor(const ModelSpec& spec, int64_t layer);
// "model.layers.3.mlp.gate.e_score_correction_bias"
std::string CorrectionBiasTensor(const ModelSpec& spec, int64_t layer);
// "model.layers.3.mlp.experts.7.up_proj.weight", in Mixtral
// "….block_sparse_moe.experts.7.w3.weight".
std::string ExpertTensor(const ModelSpec& spec, int64_t layer, int64_t expert, FfnMatrix matrix);
// "model.layers.3.mlp.shared_experts.up_proj.weight": all shared experts as one.
std::string SharedExpertsTensor(int64_t layer, FfnMatrix matrix);

}  // namespace heddle
