// Tokens that are looked for in the text before it is split.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace heddle {

struct AddedToken {
  int32_t id = 0;
  std::string content;       // What is looked for.
  bool single_word = false;  // Only where no letter or digit touches it.
  bool lstrip = false;       // Takes the spaces on its left along.
  bool rstrip = false;
  bool normalized = false;  // In the normalised text.
};

// Finds a set of added tokens: the leftmost, and of those the longest. Immutable
// and thread-safe.
class AddedTokenFinder {
 public:
  struct Segment {
    absl::string_view text;
    std::optional<int32_t> id;  // Of the token that `text` is; none for other text.
  };

  // Tokens with empty content never match; of two with equal content the first counts.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  // `text` in segments, in order. Spaces that two tokens strip go with the first.
  std::vector<Segment> Split(absl::string_view text) const;

 private:
  // The longest token that `text` starts with, or null.
  const AddedToken* TokenAtStart(absl::string_view text) const;

  std::vector<AddedToken> tokens_;  // Sorted by content.
  // [token] The longest other token that is a prefix of it, or -1.
  std::vector<int32_t> parent_;
  std::array<bool, 256> is_first_byte_ = {};
};

}  // namespace heddle
