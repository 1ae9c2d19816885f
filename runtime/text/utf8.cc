#include "runtime/text/utf8.h"

#include "absl/strings/str_cat.h"

namespace heddle {

Utf8Unit FirstUtf8Unit(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Utf8Kind::kWhole, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Kind::kInvalid, 1};
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte alone tells overlong forms, surrogates and what lies above U+10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < size; ++i) {
    if (i == text.size()) return {Utf8Kind::kIncomplete, i};
    const bool fits = i == 1 ? byte(i) >= low && byte(i) <= high : (byte(i) & 0xC0) == 0x80;
    if (!fits) return {Utf8Kind::kInvalid, i};
  }
  return {Utf8Kind::kWhole, size};
}

uint32_t CodePoint(absl::string_view unit) {
  const auto lead = static_cast<uint8_t>(unit[0]);
  // The lead byte of n > 1 bytes carries 7 - n bits, each other byte six.
  uint32_t code_point = unit.size() == 1 ? lead : lead & (0x7F >> unit.size());
  for (const char c : unit.substr(1)) code_point = code_point << 6 | (c & 0x3F);
  return code_point;
}

std::string ToValidUtf8(absl::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    const Utf8Unit unit = FirstUtf8Unit(text);
    absl::StrAppend(
        &valid, unit.kind == Utf8Kind::kWhole ? text.substr(0, unit.size) : kReplacementCharacter);
    text.remove_prefix(unit.size);
  }
  return valid;
}

}  // namespace heddle
