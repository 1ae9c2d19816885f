// The ids of a model and what each of them is: filled once by a loader, then immutable.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace heddle {

struct Token {
  std::string text = {};   // As the vocabulary spells it: "Ġthe", "▁the", "<0x0A>", "<s>".
  std::string bytes = {};  // What it adds to the output: " the", "\n"; not always whole UTF-8.
  bool special = false;    // Control token, left out of the output on request.
};

// What becomes of the space in front of the output.
enum class LeadingSpace {
  kKeep,
  kDropOneSpace,       // At the start of the text, whatever token it comes from.
  kDropOneMarker,      // At the start of the text (sentencepiece).
  kDropOneMarkerEach,  // Of each token until there is text (sentencepiece).
  kDropFirstMarkers,   // All those in the first token (Metaspace).
};

// How bytes become text, beyond putting one token after the other.
struct DecodeRule {
  LeadingSpace leading_space = LeadingSpace::kKeep;
  // Bytes that are not UTF-8 become one U+FFFD each; otherwise one for each
  // longest prefix of a code point.
  bool replace_each_byte = false;
};

// Sentencepiece's stand-in for a space, U+2581.
inline constexpr absl::string_view kSpaceMarker = "\xE2\x96\x81";

// The byte that a token spelled "<0xHH>" stands for.
std::optional<uint8_t> ByteOfToken(absl::string_view text);

// Invariants: ids are 0 .. size() - 1; an id without a token has empty text and
// bytes; a text names one id.
class Vocabulary {
 public:
  Vocabulary() = default;
  Vocabulary(Vocabulary&&) = default;
  Vocabulary& operator=(Vocabulary&&) = default;

  // The first error, if any: an id that is negative, absurdly high or taken, a
  // text that is empty or taken.
  absl::Status Add(int32_t id, Token token);
  // The token to amend, or null. Its text must stay.
  Token* Find(int32_t id);

  const Token& token(int32_t id) const;  // An empty one for any unknown id.
  std::optional<int32_t> IdOf(absl::string_view text) const;
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }

  DecodeRule decode_rule;
  std::optional<int32_t> bos_id;
  std::vector<int32_t> eos_ids;

 private:
  std::vector<Token> tokens_;
  absl::flat_hash_map<std::string, int32_t> id_of_;
};

}  // namespace heddle
