// tokenizer.json, as Hugging Face's tokenizers write it.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/bpe_tokenizer.h"
#include "runtime/text/json_value.h"
#include "runtime/text/pipeline_json.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/tokenizer_config.h"

namespace heddle {
namespace {

absl::StatusOr<Vocabulary> ParseVocabulary(const JsonValue& model, const TokenDecoder& decoder) {
  Vocabulary vocabulary;
  ASSIGN_OR_RETURN(const JsonValue vocab, model.Get("vocab"));
  ASSIGN_OR_RETURN(const std::vector<JsonValue::Member> members, vocab.Members());
  for (const auto& [text, value] : members) {
    ASSIGN_OR_RETURN(const int32_t id, value.Int32());
    const absl::Status added =
        vocabulary.Add(id, {.text = std::string(text), .bytes = decoder.BytesOf(text)});
    if (!added.ok()) return vocab.Invalid(added.message());
  }
  return vocabulary;
}

// "left right" or ["left", "right"], by the age of the file.
using TextPair = std::pair<absl::string_view, absl::string_view>;
absl::StatusOr<TextPair> ParsePair(const JsonValue& merge) {
  if (merge.IsString()) {
    ASSIGN_OR_RETURN(const absl::string_view text, merge.String());
    const std::vector<absl::string_view> parts = absl::StrSplit(text, ' ');
    if (parts.size() != 2) return merge.Invalid("must be two tokens with a space between them");
    return TextPair(parts[0], parts[1]);
  }
  ASSIGN_OR_RETURN(const std::vector<JsonValue> parts, merge.Elements());
  if (parts.size() != 2) return merge.Invalid("must be two tokens");
  ASSIGN_OR_RETURN(const absl::string_view left, parts[0].String());
  ASSIGN_OR_RETURN(const absl::string_view right, parts[1].String());
  return TextPair(left, right);
}

absl::StatusOr<std::vector<BpeMerge>> ParseMerges(const JsonValue& model,
                                                  const Vocabulary& vocabulary) {
  ASSIGN_OR_RETURN(const JsonValue value, model.Get("merges"));
  ASSIGN_OR_RETURN(const std::vector<JsonValue> elements, value.Elements());
  std::vector<BpeMerge> merges;
  merges.reserve(elements.size());
  for (const JsonValue& element : elements) {
    ASSIGN_OR_RETURN(const TextPair pair, ParsePair(element));
    const auto rank = static_cast<int32_t>(merges.size());
    const absl::StatusOr<BpeMerge> merge = MakeMerge(vocabulary, pair.first, pair.second, rank);
    if (!merge.ok()) return element.Invalid(merge.status().message());
    merges.push_back(*merge);
  }
  return merges;
}

absl::StatusOr<BpeOptions> ParseBpeOptions(const JsonValue& model, const Vocabulary& vocabulary) {
  if (model.Find("dropout").has_value()) return model.Unsupported("dropout is not supported");
  for (const absl::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const std::optional<JsonValue> affix = model.Find(key);
    if (!affix.has_value()) continue;
    ASSIGN_OR_RETURN(const absl::string_view text, affix->String());
    if (!text.empty()) return affix->Unsupported("only an empty one is supported");
  }
  BpeOptions options;
  ASSIGN_OR_RETURN(options.byte_fallback, model.BoolOr("byte_fallback", false));
  ASSIGN_OR_RETURN(options.fuse_unknown, model.BoolOr("fuse_unk", false));
  ASSIGN_OR_RETURN(options.ignore_merges, model.BoolOr("ignore_merges", false));
  if (const std::optional<JsonValue> unknown = model.Find("unk_token")) {
    ASSIGN_OR_RETURN(const absl::string_view text, unknown->String());
    options.unknown_id = vocabulary.IdOf(text);
    if (!options.unknown_id.has_value()) {
      return unknown->Invalid(absl::StrCat("\"", text, "\" is not in the vocabulary"));
    }
  }
  return options;
}

// Also adds the tokens to the vocabulary or, where the model has them, marks them.
absl::StatusOr<std::vector<AddedToken>> ParseAddedTokens(const JsonValue& root,
                                                         const Normalizer& normalizer,
                                                         const TokenDecoder& decoder,
                                                         Vocabulary* vocabulary) {
  std::vector<AddedToken> tokens;
  const std::optional<JsonValue> list = root.Find("added_tokens");
  if (!list.has_value()) return tokens;
  ASSIGN_OR_RETURN(const std::vector<JsonValue> elements, list->Elements());
  for (const JsonValue& element : elements) {
    AddedToken token;
    ASSIGN_OR_RETURN(const JsonValue id, element.Get("id"));
    ASSIGN_OR_RETURN(token.id, id.Int32());
    ASSIGN_OR_RETURN(const JsonValue content, element.Get("content"));
    ASSIGN_OR_RETURN(const absl::string_view text, content.String());
    ASSIGN_OR_RETURN(const bool special, element.BoolOr("special", false));
    ASSIGN_OR_RETURN(token.single_word, element.BoolOr("single_word", false));
    ASSIGN_OR_RETURN(token.lstrip, element.BoolOr("lstrip", false));
    ASSIGN_OR_RETURN(token.rstrip, element.BoolOr("rstrip", false));
    ASSIGN_OR_RETURN(token.normalized, element.BoolOr("normalized", !special));
    token.content = std::string(text);
    if (token.normalized) {
      ASSIGN_OR_RETURN(token.content, normalizer.Normalize(text));
    }
    if (vocabulary->IdOf(text) != token.id) {
      const absl::Status added = vocabulary->Add(token.id, {.text = std::string(text)});
      if (!added.ok()) return element.Invalid(added.message());
    }
    Token* entry = vocabulary->Find(token.id);
    // Spelled out even where byte-level tokens are letters for bytes.
    entry->bytes = decoder.byte_level ? token.content : decoder.BytesOf(token.content);
    entry->special = special;
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(absl::string_view tokenizer_json,
                                                              absl::string_view tokenizer_config) {
  simdjson::dom::parser parser;
  ASSIGN_OR_RETURN(const JsonValue root,
                   JsonValue::Parse(tokenizer_json, "tokenizer.json", &parser));
  // "truncation" and "padding" are left aside: they are whims of the program that
  // wrote the file.
  ASSIGN_OR_RETURN(const JsonValue model, root.Get("model"));
  if (const std::optional<JsonValue> type = model.Find("type")) {
    ASSIGN_OR_RETURN(const absl::string_view name, type->String());
    if (name != "BPE") {
      return type->Unsupported(absl::StrCat("\"", name, "\" is not supported, only \"BPE\""));
    }
  }
  ASSIGN_OR_RETURN(TokenDecoder decoder, ParseDecoder(root));
  ASSIGN_OR_RETURN(Normalizer normalizer, ParseNormalizer(root));
  ASSIGN_OR_RETURN(PreTokenization pre_tokenization, ParsePreTokenizer(root));
  if (decoder.byte_level != pre_tokenization.byte_level) {
    return root.Unsupported("ByteLevel must be both the decoder and the last pre-tokenizer");
  }
  ASSIGN_OR_RETURN(SpecialIds special, ParsePostProcessor(root));
  ASSIGN_OR_RETURN(const TokenizerConfig config, ParseTokenizerConfig(tokenizer_config));

  ASSIGN_OR_RETURN(Vocabulary vocabulary, ParseVocabulary(model, decoder));
  vocabulary.decode_rule = decoder.rule;
  ASSIGN_OR_RETURN(const std::vector<BpeMerge> merges, ParseMerges(model, vocabulary));
  ASSIGN_OR_RETURN(BpeOptions options, ParseBpeOptions(model, vocabulary));
  options.byte_level = decoder.byte_level;
  BpeModel bpe(vocabulary, merges, options);
  ASSIGN_OR_RETURN(std::vector<AddedToken> added_tokens,
                   ParseAddedTokens(root, normalizer, decoder, &vocabulary));
  for (const std::vector<int32_t>* ids : {&special.prefix, &special.suffix}) {
    for (const int32_t id : *ids) {
      if (vocabulary.Find(id) == nullptr) {
        return root.Invalid(
            absl::StrCat("the post_processor adds the id ", id, ", which is no token's"));
      }
    }
  }
  RETURN_IF_ERROR(ApplyTokenizerConfig(config, &vocabulary, &special.prefix, &special.suffix));

  return std::make_unique<BpeTokenizer>(
      BpeTokenizer::Parts{std::move(vocabulary), std::move(added_tokens), std::move(normalizer),
                          std::move(pre_tokenization.pre_tokenizer), std::move(bpe),
                          std::move(special.prefix), std::move(special.suffix)});
}

}  // namespace heddle
