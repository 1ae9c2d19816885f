#include "runtime/text/tokenizer.h"

#include "runtime/text/stream_decoder.h"

namespace heddle {

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  StreamDecoder decoder(this, skip_special_tokens);
  std::string text;
  for (const int32_t id : ids) text += decoder.Push(id);
  return text + decoder.Flush();
}

}  // namespace heddle
