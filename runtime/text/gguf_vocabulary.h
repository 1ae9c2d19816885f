// The tokenizer.ggml.* metadata of a GGUF file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace heddle {

// Filled by the GGUF reader, which checks only that the types are right; the
// tokenizer checks the rest. A key that the file lacks leaves its field empty.
struct GgufVocabulary {
  std::string model;                 // tokenizer.ggml.model: "gpt2" or "llama"
  std::string pre;                   // tokenizer.ggml.pre: the split rule of "gpt2"
  std::vector<std::string> tokens;   // tokenizer.ggml.tokens
  std::vector<float> scores;         // tokenizer.ggml.scores
  std::vector<int32_t> token_types;  // tokenizer.ggml.token_type
  std::vector<std::string> merges;   // tokenizer.ggml.merges
  std::optional<uint32_t> bos_id;    // tokenizer.ggml.bos_token_id, and so on
  std::optional<uint32_t> eos_id;
  std::optional<uint32_t> eot_id;
  std::optional<uint32_t> unknown_id;
  std::optional<bool> add_bos;           // tokenizer.ggml.add_bos_token
  std::optional<bool> add_eos;           // tokenizer.ggml.add_eos_token
  std::optional<bool> add_space_prefix;  // tokenizer.ggml.add_space_prefix
};

}  // namespace heddle
