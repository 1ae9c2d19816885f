#include "runtime/text/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "runtime/text/utf8.h"

namespace heddle {
namespace {

constexpr uint32_t kNumLetters = 0x144;

bool IsItsOwnLetter(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
}

// [code point of a letter] -> byte, or -1.
std::array<int16_t, kNumLetters> MakeByteOfLetter() {
  std::array<int16_t, kNumLetters> byte_of_letter;
  byte_of_letter.fill(-1);
  uint32_t next = 0x100;
  for (int16_t byte = 0; byte < 256; ++byte) {
    byte_of_letter[IsItsOwnLetter(byte) ? byte : next++] = byte;
  }
  return byte_of_letter;
}

}  // namespace

std::optional<std::string> BytesOfLetters(absl::string_view text) {
  static const std::array<int16_t, kNumLetters> kByteOfLetter = MakeByteOfLetter();
  std::string bytes;
  while (!text.empty()) {
    const Utf8Unit unit = FirstUtf8Unit(text);
    if (unit.kind != Utf8Kind::kWhole) return std::nullopt;
    const uint32_t letter = CodePoint(text.substr(0, unit.size));
    if (letter >= kNumLetters || kByteOfLetter[letter] < 0) return std::nullopt;
    bytes += static_cast<char>(kByteOfLetter[letter]);
    text.remove_prefix(unit.size);
  }
  return bytes;
}

}  // namespace heddle
