// A vocabulary written down in a test; it does not encode.
#pragma once

#include <utility>
#include <vector>

#include "kernels/base/logging.h"
#include "runtime/text/tokenizer.h"

namespace heddle {

class TinyTokenizer : public Tokenizer {
 public:
  explicit TinyTokenizer(std::vector<Token> tokens, DecodeRule rule = {})
      : Tokenizer(Make(std::move(tokens), rule)) {}

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view, bool) const override {
    return absl::UnimplementedError("a tiny tokenizer only decodes");
  }

 private:
  static Vocabulary Make(std::vector<Token> tokens, DecodeRule rule) {
    Vocabulary vocabulary;
    vocabulary.decode_rule = rule;
    for (Token& token : tokens) CHECK_OK(vocabulary.Add(vocabulary.size(), std::move(token)));
    return vocabulary;
  }
};

}  // namespace heddle
