// Well-formed UTF-8 (Unicode 15, table 3-7: no surrogates, no overlong forms).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace heddle {

inline constexpr absl::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

enum class Utf8Kind {
  kWhole,       // One code point.
  kIncomplete,  // A proper prefix of a code point that runs to the end of the text.
  kInvalid,     // The longest prefix of a code point, cut by a byte that does not fit.
};

struct Utf8Unit {
  Utf8Kind kind;
  size_t size;  // Bytes, 1 to 4.
};

// What stands at the start of `text`, which must not be empty.
Utf8Unit FirstUtf8Unit(absl::string_view text);

// The code point that a whole unit encodes.
uint32_t CodePoint(absl::string_view unit);

// `text` with each ill-formed unit replaced by one U+FFFD.
std::string ToValidUtf8(absl::string_view text);

}  // namespace heddle
