#include "runtime/text/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

// Unicode's White_Space.
bool IsSpace(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// A letter, mark, digit or connector, or one of the two joiners.
bool IsWordCharacter(uint32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    case UTF8PROC_CATEGORY_SO:  // Circled letters are Alphabetic.
      return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
             (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
    default:
      return c == 0x200C || c == 0x200D;
  }
}

uint32_t FirstCharacter(absl::string_view text) {
  return CodePoint(text.substr(0, FirstUtf8Unit(text).size));
}

// Where the last character of `text` begins.
size_t LastCharacter(absl::string_view text) {
  size_t begin = text.size() - 1;
  while ((text[begin] & 0xC0) == 0x80) --begin;
  return begin;
}

bool StartsWithWord(absl::string_view text) {
  return !text.empty() && IsWordCharacter(FirstCharacter(text));
}

bool EndsWithWord(absl::string_view text) {
  return !text.empty() && IsWordCharacter(CodePoint(text.substr(LastCharacter(text))));
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::erase_if(tokens_, [](const AddedToken& token) { return token.content.empty(); });
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  const auto same = [](const AddedToken& a, const AddedToken& b) { return a.content == b.content; };
  tokens_.erase(std::unique(tokens_.begin(), tokens_.end(), same), tokens_.end());

  parent_.reserve(tokens_.size());
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const absl::string_view content = tokens_[i].content;
    is_first_byte_[static_cast<uint8_t>(content[0])] = true;
    // A prefix of this token sorts before it, and is then the token in front of it
    // or a prefix of that one.
    auto parent = static_cast<int32_t>(i) - 1;
    while (parent >= 0 && !absl::StartsWith(content, tokens_[parent].content)) {
      parent = parent_[parent];
    }
    parent_.push_back(parent);
  }
}

const AddedToken* AddedTokenFinder::TokenAtStart(absl::string_view text) const {
  if (!is_first_byte_[static_cast<uint8_t>(text[0])]) return nullptr;
  // Tokens that are prefixes of the text are prefixes of the last token that is
  // not above the text.
  const auto above = std::upper_bound(
      tokens_.begin(), tokens_.end(), text,
      [](absl::string_view value, const AddedToken& token) { return value < token.content; });
  auto i = static_cast<int32_t>(above - tokens_.begin()) - 1;
  while (i >= 0 && !absl::StartsWith(text, tokens_[i].content)) i = parent_[i];
  return i >= 0 ? &tokens_[i] : nullptr;
}

std::vector<AddedTokenFinder::Segment> AddedTokenFinder::Split(absl::string_view text) const {
  std::vector<Segment> segments;
  size_t done = 0;  // Everything in front of this is in a segment.
  for (size_t at = 0; at < text.size();) {
    const AddedToken* token = TokenAtStart(text.substr(at));
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + token->content.size();
    at = end;
    if (token->single_word &&
        (EndsWithWord(text.substr(0, begin)) || StartsWithWord(text.substr(end)))) {
      continue;
    }
    if (token->lstrip) {
      while (begin > done) {
        const size_t last = LastCharacter(text.substr(0, begin));
        if (last < done || !IsSpace(FirstCharacter(text.substr(last)))) break;
        begin = last;
      }
    }
    if (token->rstrip) {
      while (end < text.size() && IsSpace(FirstCharacter(text.substr(end)))) {
        end += FirstUtf8Unit(text.substr(end)).size;
      }
    }
    if (done < begin) segments.push_back({text.substr(done, begin - done), std::nullopt});
    segments.push_back({text.substr(begin, end - begin), token->id});
    done = end;
  }
  if (done < text.size()) segments.push_back({text.substr(done), std::nullopt});
  return segments;
}

}  // namespace heddle
