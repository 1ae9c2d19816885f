// Any bytes as a tokenizer.json or tokenizer_config.json: refused, or a tokenizer
// whose ids are tokens and whose texts are UTF-8.
#include <cstddef>
#include <cstdint>

#include "kernels/base/logging.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  constexpr absl::string_view kPlain =
      R"({"model":{"vocab":{"<s>":0,"</s>":1,"a":2},"merges":[]},"decoder":{"type":"ByteLevel"},)"
      R"("pre_tokenizer":{"type":"ByteLevel"}})";
  (void)heddle::ParseTokenizerJson(kPlain, text);
  const auto tokenizer = heddle::ParseTokenizerJson(text, "");
  if (!tokenizer.ok()) return 0;
  constexpr absl::string_view kMixed =
      "Hello  wOrld ab abc 12345\n\n\n\t<s>don't e\xCC\x81\xE5\xA5\xBD \xF0\x9F\x98\x80 "
      "\xFF\xE4\xBD <a> ";
  for (const absl::string_view input : {kMixed, text.substr(0, 256)}) {
    const auto ids = (*tokenizer)->Encode(input, true);
    if (!ids.ok()) continue;  // A split rule that backtracks for ever.
    for (const int32_t id : *ids) CHECK(!(*tokenizer)->vocabulary().token(id).text.empty());
    for (const bool skip_special_tokens : {false, true}) {
      const std::string decoded = (*tokenizer)->Decode(*ids, skip_special_tokens);
      CHECK(heddle::ToValidUtf8(decoded) == decoded);
    }
  }
  return 0;
}
