#include "runtime/text/tokenizer_config.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/json_value.h"

namespace heddle {
namespace {

constexpr absl::string_view kFileName = "tokenizer_config.json";

absl::StatusOr<std::optional<bool>> OptionalBool(const JsonValue& root, absl::string_view key) {
  const std::optional<JsonValue> member = root.Find(key);
  if (!member.has_value()) return std::nullopt;
  ASSIGN_OR_RETURN(const bool value, member->Bool());
  return value;
}

// A token is written as its text or as {"content": text, …}.
absl::StatusOr<std::optional<std::string>> OptionalToken(const JsonValue& root,
                                                         absl::string_view key) {
  const std::optional<JsonValue> member = root.Find(key);
  if (!member.has_value()) return std::nullopt;
  const std::optional<JsonValue> content = member->Find("content");
  ASSIGN_OR_RETURN(const absl::string_view text,
                   (content.has_value() ? content : member)->String());
  return std::string(text);
}

// The id of a token that the config names as its `key`, if it does.
absl::StatusOr<std::optional<int32_t>> IdOf(const std::optional<std::string>& token,
                                            absl::string_view key, const Vocabulary& vocabulary) {
  if (!token.has_value()) return std::nullopt;
  const std::optional<int32_t> id = vocabulary.IdOf(*token);
  if (id.has_value()) return id;
  return absl::InvalidArgumentError(
      absl::StrCat(kFileName, ": ", key, " \"", *token, "\" is not in the vocabulary"));
}

// Makes `around` hold the one id, or none, if the config says which.
absl::Status Override(std::optional<bool> add, absl::string_view key, std::optional<int32_t> id,
                      std::vector<int32_t>* around) {
  if (!add.has_value()) return absl::OkStatus();
  around->clear();
  if (!*add) return absl::OkStatus();
  if (!id.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kFileName, ": add_", key, " is true, but there is no ", key));
  }
  around->push_back(*id);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(absl::string_view contents) {
  TokenizerConfig config;
  if (contents.empty()) return config;
  simdjson::dom::parser parser;
  ASSIGN_OR_RETURN(const JsonValue root, JsonValue::Parse(contents, kFileName, &parser));
  ASSIGN_OR_RETURN(config.add_bos, OptionalBool(root, "add_bos_token"));
  ASSIGN_OR_RETURN(config.add_eos, OptionalBool(root, "add_eos_token"));
  ASSIGN_OR_RETURN(config.bos, OptionalToken(root, "bos_token"));
  ASSIGN_OR_RETURN(config.eos, OptionalToken(root, "eos_token"));
  return config;
}

absl::Status ApplyTokenizerConfig(const TokenizerConfig& config, Vocabulary* vocabulary,
                                  std::vector<int32_t>* prefix_ids,
                                  std::vector<int32_t>* suffix_ids) {
  ASSIGN_OR_RETURN(vocabulary->bos_id, IdOf(config.bos, "bos_token", *vocabulary));
  ASSIGN_OR_RETURN(std::optional<int32_t> eos_id, IdOf(config.eos, "eos_token", *vocabulary));
  if (!vocabulary->bos_id.has_value() && !prefix_ids->empty()) {
    vocabulary->bos_id = prefix_ids->front();
  }
  if (!eos_id.has_value() && !suffix_ids->empty()) eos_id = suffix_ids->back();
  if (eos_id.has_value()) vocabulary->eos_ids = {*eos_id};
  RETURN_IF_ERROR(Override(config.add_bos, "bos_token", vocabulary->bos_id, prefix_ids));
  return Override(config.add_eos, "eos_token", eos_id, suffix_ids);
}

}  // namespace heddle
