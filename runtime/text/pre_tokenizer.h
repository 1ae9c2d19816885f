// Cuts text into the words within which tokens are merged, as tokenizer.json's
// "pre_tokenizer" says.
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "runtime/text/pattern.h"

namespace heddle {

// GPT-2's split rule, which is also that of a ByteLevel pre-tokenizer.
inline constexpr absl::string_view kGpt2SplitRule =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// What becomes of the matches of a split rule; the text between two matches is
// always a piece of its own, unless a match joins it.
enum class SplitBehavior {
  kRemoved,
  kIsolated,
  kMergedWithPrevious,
  kMergedWithNext,
  kContiguous,  // Matches that touch are one piece.
};

// A sequence of steps, each applied to every piece that the one before it left.
// Immutable and thread-safe.
class PreTokenizer {
 public:
  struct Split {
    Pattern pattern;
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;  // Matches and the text between them change places.
  };
  // A space in front of each piece that has none.
  struct PrefixSpace {};
  // Spaces become kSpaceMarker. One more goes in front of the pieces that have none:
  // of none of them, of the first of the text, or of all.
  enum class MarkerPrefix { kNever, kFirst, kAlways };
  struct MarkSpaces {
    MarkerPrefix prefix = MarkerPrefix::kAlways;
  };
  using Step = std::variant<Split, PrefixSpace, MarkSpaces>;
  using Sink = absl::FunctionRef<absl::Status(absl::string_view word)>;

  void Add(Step step) { steps_.push_back(std::move(step)); }

  // Calls `word` for each word of `text`, in order; none is empty. `at_start`:
  // nothing precedes `text` in what is encoded.
  absl::Status Run(absl::string_view text, bool at_start, Sink word) const {
    return RunFrom(0, text, at_start, word);
  }

 private:
  absl::Status RunFrom(size_t step, absl::string_view piece, bool at_start, Sink word) const;

  std::vector<Step> steps_;
};

}  // namespace heddle
