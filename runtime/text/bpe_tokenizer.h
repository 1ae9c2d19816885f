// The tokenizer of byte-level and of sentencepiece-style BPE, put together by the
// loaders of tokenizer.json and of GGUF metadata.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/added_tokens.h"
#include "runtime/text/bpe_model.h"
#include "runtime/text/normalizer.h"
#include "runtime/text/pre_tokenizer.h"
#include "runtime/text/tokenizer.h"

namespace heddle {

class BpeTokenizer : public Tokenizer {
 public:
  struct Parts {
    Vocabulary vocabulary;  // The model's tokens and the added ones.
    std::vector<AddedToken> added_tokens;
    Normalizer normalizer;
    PreTokenizer pre_tokenizer;
    BpeModel model;
    // Around the text where special tokens are asked for.
    std::vector<int32_t> prefix_ids;
    std::vector<int32_t> suffix_ids;
  };

  explicit BpeTokenizer(Parts parts);

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              bool add_special_tokens) const override;

 private:
  // A stretch of text without added tokens to be found before normalisation.
  absl::Status EncodeText(absl::string_view text, bool at_start, std::vector<int32_t>* ids) const;

  const AddedTokenFinder raw_tokens_;
  const AddedTokenFinder normalized_tokens_;
  const Normalizer normalizer_;
  const PreTokenizer pre_tokenizer_;
  const BpeModel model_;
  const std::vector<int32_t> prefix_ids_;
  const std::vector<int32_t> suffix_ids_;
};

}  // namespace heddle
