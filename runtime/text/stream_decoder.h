// Token ids to text, one id at a time.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace heddle {

// Text goes out as soon as its code points are whole and is never taken back:
// what Push and Flush returned, put together, is the text of all ids so far.
// Every chunk is valid UTF-8. Owned by one request; used by one thread at a time.
class StreamDecoder {
 public:
  // `tokenizer` must outlive this. With `skip_special_tokens` control tokens add
  // no text.
  StreamDecoder(const Tokenizer* tokenizer, bool skip_special_tokens);

  // The text that `id` completes, often empty within a character.
  std::string Push(int32_t id);
  // The end of the output: bytes still waiting for the rest of their code point
  // become U+FFFD.
  std::string Flush();

 private:
  // The bytes of a token that stands at the start of the output.
  std::string WithoutLeadingSpace(const Token& token);
  // The first `unit` of `bytes`, replaced where it is not whole.
  void AppendUnit(Utf8Unit unit, absl::string_view bytes, std::string* text) const;

  const Tokenizer* const tokenizer_;
  const bool skip_special_tokens_;
  bool at_start_ = true;  // No text yet: the leading-space rule applies.
  std::string pending_;   // Between calls, the first bytes of a code point: at most 3.
};

}  // namespace heddle
