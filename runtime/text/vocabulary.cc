#include "runtime/text/vocabulary.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

// Above any vocabulary in use; keeps a file from asking for gigabytes with one id.
constexpr int32_t kMaxTokens = 1 << 21;

}  // namespace

std::optional<uint8_t> ByteOfToken(absl::string_view text) {
  if (text.size() != 6 || !absl::StartsWith(text, "<0x") || text[5] != '>') return std::nullopt;
  if (!absl::ascii_isxdigit(text[3]) || !absl::ascii_isxdigit(text[4])) return std::nullopt;
  return static_cast<uint8_t>(absl::HexStringToBytes(text.substr(3, 2))[0]);
}

absl::Status Vocabulary::Add(int32_t id, Token token) {
  if (token.text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("token ", id, " is empty"));
  }
  if (id < 0 || id >= kMaxTokens) {
    return absl::InvalidArgumentError(absl::StrCat("token \"", token.text, "\" has the id ", id,
                                                   ", which is not in 0 to ", kMaxTokens - 1));
  }
  if (id >= size()) tokens_.resize(id + 1);
  Token& place = tokens_[id];
  if (!place.text.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens \"", place.text, "\" and \"", token.text, "\" share the id ", id));
  }
  const auto [other, is_new] = id_of_.try_emplace(token.text, id);
  if (!is_new) {
    return absl::InvalidArgumentError(
        absl::StrCat("token \"", token.text, "\" has two ids, ", other->second, " and ", id));
  }
  place = std::move(token);
  return absl::OkStatus();
}

Token* Vocabulary::Find(int32_t id) {
  return id >= 0 && id < size() && !tokens_[id].text.empty() ? &tokens_[id] : nullptr;
}

const Token& Vocabulary::token(int32_t id) const {
  static const Token* const kNone = new Token;
  return id >= 0 && id < size() ? tokens_[id] : *kNone;
}

std::optional<int32_t> Vocabulary::IdOf(absl::string_view text) const {
  const auto found = id_of_.find(text);
  if (found == id_of_.end()) return std::nullopt;
  return found->second;
}

}  // namespace heddle
