// Text to token ids and back, as Hugging Face's tokenizers and sentencepiece do it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/gguf_vocabulary.h"
#include "runtime/text/vocabulary.h"

namespace heddle {

// Immutable and thread-safe. Owned by the engine; stream decoders point to it.
class Tokenizer {
 public:
  explicit Tokenizer(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // The ids of `text`. `add_special_tokens` puts the model's BOS (and EOS) around
  // them: true for raw text, false for text that a chat template has written,
  // which spells its own. Added tokens inside the text become their ids either
  // way. Bytes that are not UTF-8 are read as U+FFFD, one for each longest prefix
  // of a code point (Python's decode(errors="replace")). Empty text gives no ids
  // but the special ones.
  virtual absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                                      bool add_special_tokens) const = 0;

  // All of the stream decoder's text for `ids` at once.
  std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens) const;

  // The bytes that `id` adds to the output, perhaps part of a code point. Any id
  // without text, such as the padding of an embedding, adds nothing.
  std::string TokenBytes(int32_t id) const { return vocabulary_.token(id).bytes; }
  bool IsSpecial(int32_t id) const { return vocabulary_.token(id).special; }
  // The id of a token as the vocabulary spells it, such as "<|im_end|>".
  std::optional<int32_t> TokenId(absl::string_view text) const { return vocabulary_.IdOf(text); }
  // The highest id + 1; the model's embedding may have more rows.
  int32_t vocab_size() const { return vocabulary_.size(); }
  std::optional<int32_t> bos_id() const { return vocabulary_.bos_id; }
  // As the tokenizer's files tell; generation_config.json may add others.
  const std::vector<int32_t>& eos_ids() const { return vocabulary_.eos_ids; }
  const Vocabulary& vocabulary() const { return vocabulary_; }

 private:
  const Vocabulary vocabulary_;
};

// The tokenizer of a model directory: tokenizer.json, else tokenizer.model, with
// tokenizer_config.json where there is one.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& directory);

// From the contents of tokenizer.json and tokenizer_config.json (may be empty).
// Refuses every rule, normaliser, pre-tokenizer, decoder and model it does not
// know. add_bos_token and add_eos_token of the config win over the post-processor.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(absl::string_view tokenizer_json,
                                                              absl::string_view tokenizer_config);

// A bare tokenizer.model, through libsentencepiece. Without a word of the config,
// BOS is added if the model has one and EOS is not.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseSentencePiece(absl::string_view model,
                                                              absl::string_view tokenizer_config);

// From the metadata of a GGUF file.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeGgufTokenizer(const GgufVocabulary& vocabulary);

}  // namespace heddle
