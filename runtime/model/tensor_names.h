// The Hugging Face names under which every checkpoint offers its tensors.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace heddle {

inline constexpr absl::string_view kEmbeddingTensor = "model.embed_tokens.weight";
inline constexpr absl::string_view kFinalNormTensor = "model.norm.weight";
inline constexpr absl::string_view kHeadTensor = "lm_head.weight";

// LayerTensor(0, "self_attn.q_proj.weight")
inline std::string LayerTensor(int64_t layer, absl::string_view suffix) {
  return absl::StrCat("model.layers.", layer, ".", suffix);
}

}  // namespace heddle
