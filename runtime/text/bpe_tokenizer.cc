#include "runtime/text/bpe_tokenizer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

// Positions in a word have 32 bits, and a normaliser may make a text longer.
constexpr size_t kMaxTextBytes = 1 << 28;

std::vector<AddedToken> Select(const std::vector<AddedToken>& tokens, bool normalized) {
  std::vector<AddedToken> selected;
  for (const AddedToken& token : tokens) {
    if (token.normalized == normalized) selected.push_back(token);
  }
  return selected;
}

}  // namespace

BpeTokenizer::BpeTokenizer(Parts parts)
    : Tokenizer(std::move(parts.vocabulary)),
      raw_tokens_(Select(parts.added_tokens, false)),
      normalized_tokens_(Select(parts.added_tokens, true)),
      normalizer_(std::move(parts.normalizer)),
      pre_tokenizer_(std::move(parts.pre_tokenizer)),
      model_(std::move(parts.model)),
      prefix_ids_(std::move(parts.prefix_ids)),
      suffix_ids_(std::move(parts.suffix_ids)) {}

absl::StatusOr<std::vector<int32_t>> BpeTokenizer::Encode(absl::string_view text,
                                                          bool add_special_tokens) const {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a text of ", text.size(), " bytes is longer than ", kMaxTextBytes));
  }
  std::vector<int32_t> ids;
  if (add_special_tokens) ids = prefix_ids_;
  const std::string valid = ToValidUtf8(text);
  for (const AddedTokenFinder::Segment& segment : raw_tokens_.Split(valid)) {
    if (segment.id.has_value()) {
      ids.push_back(*segment.id);
    } else {
      const bool at_start = segment.text.data() == valid.data();
      RETURN_IF_ERROR(EncodeText(segment.text, at_start, &ids));
    }
  }
  if (add_special_tokens) ids.insert(ids.end(), suffix_ids_.begin(), suffix_ids_.end());
  return ids;
}

absl::Status BpeTokenizer::EncodeText(absl::string_view text, bool at_start,
                                      std::vector<int32_t>* ids) const {
  ASSIGN_OR_RETURN(const std::string normalized, normalizer_.Normalize(text));
  for (const AddedTokenFinder::Segment& segment : normalized_tokens_.Split(normalized)) {
    if (segment.id.has_value()) {
      ids->push_back(*segment.id);
      continue;
    }
    RETURN_IF_ERROR(pre_tokenizer_.Run(segment.text,
                                       at_start && segment.text.data() == normalized.data(),
                                       [&](absl::string_view word) {
                                         model_.Encode(word, ids);
                                         return absl::OkStatus();
                                       }));
  }
  return absl::OkStatus();
}

}  // namespace heddle
