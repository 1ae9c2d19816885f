#include "runtime/text/stream_decoder.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "runtime/text/utf8.h"

namespace heddle {

StreamDecoder::StreamDecoder(const Tokenizer* tokenizer, bool skip_special_tokens)
    : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

std::string StreamDecoder::Push(int32_t id) {
  const Token& token = tokenizer_->vocabulary().token(id);
  if (token.text.empty() || (token.special && skip_special_tokens_)) return "";
  absl::StrAppend(&pending_, at_start_ ? WithoutLeadingSpace(token) : token.bytes);

  std::string text;
  absl::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Unit unit = FirstUtf8Unit(rest);
    if (unit.kind == Utf8Kind::kIncomplete) break;
    AppendUnit(unit, rest, &text);
    rest.remove_prefix(unit.size);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return text;
}

std::string StreamDecoder::Flush() {
  std::string text;
  if (!pending_.empty()) AppendUnit({Utf8Kind::kIncomplete, pending_.size()}, pending_, &text);
  pending_.clear();
  return text;
}

void StreamDecoder::AppendUnit(Utf8Unit unit, absl::string_view bytes, std::string* text) const {
  if (unit.kind == Utf8Kind::kWhole) {
    absl::StrAppend(text, bytes.substr(0, unit.size));
    return;
  }
  const size_t count = tokenizer_->vocabulary().decode_rule.replace_each_byte ? unit.size : 1;
  for (size_t i = 0; i < count; ++i) absl::StrAppend(text, kReplacementCharacter);
}

std::string StreamDecoder::WithoutLeadingSpace(const Token& token) {
  absl::string_view bytes = token.bytes;
  switch (tokenizer_->vocabulary().decode_rule.leading_space) {
    case LeadingSpace::kKeep:
      break;
    case LeadingSpace::kDropOneSpace:
      absl::ConsumePrefix(&bytes, " ");
      break;
    case LeadingSpace::kDropOneMarker:
      if (absl::StartsWith(token.text, kSpaceMarker)) bytes.remove_prefix(1);
      break;
    case LeadingSpace::kDropOneMarkerEach:
      if (absl::StartsWith(token.text, kSpaceMarker)) bytes.remove_prefix(1);
      at_start_ = bytes.empty();
      return std::string(bytes);
    case LeadingSpace::kDropFirstMarkers:
      at_start_ = false;
      return absl::StrReplaceAll(token.text, {{kSpaceMarker, ""}});
  }
  at_start_ = token.bytes.empty();
  return std::string(bytes);
}

}  // namespace heddle
