#include "runtime/text/pre_tokenizer.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/vocabulary.h"

namespace heddle {
namespace {

struct Piece {
  size_t begin;
  size_t end;
  bool is_match;
};

// The text as matches and what lies between them.
absl::StatusOr<std::vector<Piece>> Cut(const PreTokenizer::Split& split, absl::string_view text) {
  std::vector<Pattern::Match> matches;
  RETURN_IF_ERROR(split.pattern.FindAll(text, &matches));
  std::vector<Piece> pieces;
  pieces.reserve(2 * matches.size() + 1);
  size_t end = 0;
  for (const Pattern::Match& match : matches) {
    if (end < match.begin) pieces.push_back({end, match.begin, split.invert});
    pieces.push_back({match.begin, match.end, !split.invert});
    end = match.end;
  }
  if (end < text.size()) pieces.push_back({end, text.size(), split.invert});
  return pieces;
}

// Whether `next` joins the piece in front of it.
bool Joins(SplitBehavior behavior, const Piece& previous, const Piece& next) {
  switch (behavior) {
    case SplitBehavior::kRemoved:
    case SplitBehavior::kIsolated:
      return false;
    case SplitBehavior::kMergedWithPrevious:
      return next.is_match && !previous.is_match;
    case SplitBehavior::kMergedWithNext:
      return previous.is_match && !next.is_match;
    case SplitBehavior::kContiguous:
      return previous.is_match == next.is_match;
  }
  return false;
}

}  // namespace

absl::Status PreTokenizer::RunFrom(size_t step_index, absl::string_view piece, bool at_start,
                                   Sink word) const {
  if (piece.empty()) return absl::OkStatus();
  if (step_index == steps_.size()) return word(piece);
  const Step& step = steps_[step_index];

  if (std::holds_alternative<PrefixSpace>(step)) {
    if (piece[0] == ' ') return RunFrom(step_index + 1, piece, at_start, word);
    return RunFrom(step_index + 1, absl::StrCat(" ", piece), at_start, word);
  }
  if (const auto* mark = std::get_if<MarkSpaces>(&step)) {
    std::string marked = absl::StrReplaceAll(piece, {{" ", kSpaceMarker}});
    const bool takes_prefix =
        mark->prefix == MarkerPrefix::kAlways || (mark->prefix == MarkerPrefix::kFirst && at_start);
    if (takes_prefix && !absl::StartsWith(marked, kSpaceMarker)) {
      marked = absl::StrCat(kSpaceMarker, marked);
    }
    return RunFrom(step_index + 1, marked, at_start, word);
  }

  const auto& split = std::get<Split>(step);
  ASSIGN_OR_RETURN(const std::vector<Piece> cuts, Cut(split, piece));
  for (size_t i = 0; i < cuts.size();) {
    const size_t first = i++;
    while (i < cuts.size() && Joins(split.behavior, cuts[i - 1], cuts[i])) ++i;
    if (split.behavior == SplitBehavior::kRemoved && cuts[first].is_match) continue;
    const size_t begin = cuts[first].begin;
    RETURN_IF_ERROR(RunFrom(step_index + 1, piece.substr(begin, cuts[i - 1].end - begin),
                            at_start && begin == 0, word));
  }
  return absl::OkStatus();
}

}  // namespace heddle
