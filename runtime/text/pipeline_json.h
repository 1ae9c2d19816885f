// The steps of tokenizer.json around the model.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/text/json_value.h"
#include "runtime/text/normalizer.h"
#include "runtime/text/pre_tokenizer.h"
#include "runtime/text/vocabulary.h"

namespace heddle {

// All of them take the whole document and refuse what they do not know.

absl::StatusOr<Normalizer> ParseNormalizer(const JsonValue& root);

struct PreTokenization {
  PreTokenizer pre_tokenizer;
  bool byte_level = false;  // The model sees the bytes of a word as letters.
};
absl::StatusOr<PreTokenization> ParsePreTokenizer(const JsonValue& root);

struct TokenDecoder {
  bool byte_level = false;     // Letters stand for bytes; otherwise markers for spaces.
  bool byte_fallback = false;  // "<0xHH>" stands for a byte.
  DecodeRule rule;

  // What a token of the model's vocabulary adds to the output.
  std::string BytesOf(absl::string_view text) const;
};
absl::StatusOr<TokenDecoder> ParseDecoder(const JsonValue& root);

// What the post-processor puts around a text.
struct SpecialIds {
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;
};
absl::StatusOr<SpecialIds> ParsePostProcessor(const JsonValue& root);

}  // namespace heddle
