// What tokenizer_config.json says about the start and the end of a text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/vocabulary.h"

namespace heddle {

struct TokenizerConfig {
  std::optional<bool> add_bos;  // add_bos_token
  std::optional<bool> add_eos;
  std::optional<std::string> bos;  // bos_token
  std::optional<std::string> eos;
};

// From the file's contents, which may be empty.
absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(absl::string_view contents);

// Sets BOS and EOS of the vocabulary, from the config or else from the ids that
// surround a text, and makes those ids what the config asks for. Fails if a token
// that the config names is not in the vocabulary.
absl::Status ApplyTokenizerConfig(const TokenizerConfig& config, Vocabulary* vocabulary,
                                  std::vector<int32_t>* prefix_ids,
                                  std::vector<int32_t>* suffix_ids);

}  // namespace heddle
