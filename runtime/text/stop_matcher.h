// Stop strings in a stream of text, also across tokens.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer.h"

namespace heddle {

// Lets text through as soon as no stop string can begin in it. The first stop
// string to become whole ends the output in front of itself (of several that end
// at the same character, the longest), however the text is cut into pushes.
// Owned by one request; used by one thread at a time.
class StopMatcher {
 public:
  // Empty stop strings are ignored.
  explicit StopMatcher(std::vector<std::string> stops);

  // Adds the text of one token and returns what may go out. A piece goes out whole
  // or waits whole, so that no chunk ends inside a token's text unless a stop
  // string does. While `may_stop` is false (before min_tokens) a whole stop
  // string is only text, but one that becomes whole later still counts.
  // After a match nothing comes out any more.
  std::string Push(absl::string_view text, bool may_stop = true);
  // The output has ended for another reason: the text still held.
  std::string Flush();

  // The stop string that ended the output.
  const std::optional<std::string>& matched() const { return matched_; }

 private:
  struct Stop {
    std::string text;
    std::vector<size_t> fallback;  // [text.size() + 1], longest border of each prefix
    size_t num_matched = 0;        // Longest prefix that the text ends with.
  };

  std::vector<Stop> stops_;
  std::string held_;
  std::deque<size_t> held_pieces_;  // Sizes of the pushes that make up `held_`.
  std::optional<std::string> matched_;
};

// The ids of special tokens spelled like one of `stops`: their text is left out of
// the output, so they must be stopped at by id.
std::vector<int32_t> SpecialStopIds(const Tokenizer& tokenizer, std::span<const std::string> stops);

}  // namespace heddle
