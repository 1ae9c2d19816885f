// The tokenizer that the metadata of a GGUF file describes.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/bpe_tokenizer.h"
#include "runtime/text/pipeline_json.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

// tokenizer.ggml.token_type
enum TokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4 };

// Real tokens are below 200 bytes; how a token splits takes time quadratic in this.
constexpr size_t kMaxPieceBytes = 4096;

// What a value of tokenizer.ggml.pre stands for.
struct SplitFamily {
  std::vector<absl::string_view> names;
  std::vector<absl::string_view> rules;  // Each isolates its matches.
  bool compose = false;                  // The family's tokenizer.json says NFC.
  bool ignore_merges = false;
  bool add_bos = false;  // Unless the file says otherwise.
};

const std::vector<SplitFamily>& SplitFamilies() {
  static const auto* const kFamilies = new std::vector<SplitFamily>{
      {.names = {"gpt-2"}, .rules = {kGpt2SplitRule}},
      {.names = {"smollm"}, .rules = {R"(\p{N})", kGpt2SplitRule}},
      {.names = {"llama-bpe", "llama3", "llama-v3"},
       .rules = {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
                 R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
       .ignore_merges = true,
       .add_bos = true},
      {.names = {"qwen2", "deepseek-r1-qwen"},
       .rules = {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
                 R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
       .compose = true},
      {.names = {"deepseek-v3"},
       .rules = {R"(\p{N}{1,3})", R"([一-龥぀-ゟ゠-ヿ]+)",
                 R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+)"
                 R"(|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*)"
                 R"(|\s*[\r\n]+|\s+(?!\S)|\s+)"}}};
  return *kFamilies;
}

absl::StatusOr<SplitFamily> FindFamily(absl::string_view pre) {
  std::vector<absl::string_view> known;
  for (const SplitFamily& family : SplitFamilies()) {
    for (const absl::string_view name : family.names) {
      if (name == pre) return family;
      known.push_back(name);
    }
  }
  return absl::UnimplementedError(absl::StrCat(
      "tokenizer.ggml.pre \"", pre, "\" is not supported; known are ", absl::StrJoin(known, ", ")));
}

int32_t TypeOf(const GgufVocabulary& gguf, size_t id) {
  return gguf.token_types.empty() ? int32_t{kNormal} : gguf.token_types[id];
}

// Tokens that are looked for in the text, before it is split.
bool IsAdded(int32_t type) { return type == kUnknown || type == kControl || type == kUserDefined; }

absl::Status CheckSizes(const GgufVocabulary& gguf) {
  const size_t num_tokens = gguf.tokens.size();
  if (num_tokens == 0) return absl::InvalidArgumentError("tokenizer.ggml.tokens is empty");
  const std::pair<absl::string_view, size_t> lists[] = {
      {"tokenizer.ggml.token_type", gguf.token_types.size()},
      {"tokenizer.ggml.scores", gguf.scores.size()}};
  for (const auto& [key, size] : lists) {
    if (size == 0 || size == num_tokens) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(key, " has ", size, " entries, but tokenizer.ggml.tokens has ", num_tokens));
  }
  return absl::OkStatus();
}

absl::StatusOr<Vocabulary> MakeVocabulary(const GgufVocabulary& gguf, const TokenDecoder& decoder) {
  Vocabulary vocabulary;
  vocabulary.decode_rule = decoder.rule;
  for (size_t id = 0; id < gguf.tokens.size(); ++id) {
    const std::string& text = gguf.tokens[id];
    if (text.empty()) continue;  // An id without a token.
    if (ToValidUtf8(text) != text || text.size() > kMaxPieceBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tokenizer.ggml.tokens[", id, "] is not UTF-8 of at most ", kMaxPieceBytes, " bytes"));
    }
    const int32_t type = TypeOf(gguf, id);
    Token token = {.text = text,
                   .bytes = decoder.byte_level && IsAdded(type) ? text : decoder.BytesOf(text),
                   .special = type == kControl || type == kUnknown};
    const absl::Status added = vocabulary.Add(static_cast<int32_t>(id), std::move(token));
    if (!added.ok()) return Annotate(added, "tokenizer.ggml.tokens");
  }
  return vocabulary;
}

// A special id of the file, which must be a token's.
absl::StatusOr<std::optional<int32_t>> SpecialId(const std::optional<uint32_t>& id,
                                                 absl::string_view key, Vocabulary* vocabulary) {
  if (!id.has_value()) return std::nullopt;
  if (*id >= static_cast<uint32_t>(vocabulary->size()) ||
      vocabulary->Find(static_cast<int32_t>(*id)) == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(key, " is ", *id, ", which is no token's"));
  }
  return static_cast<int32_t>(*id);
}

absl::StatusOr<std::vector<BpeMerge>> MergesOfList(const GgufVocabulary& gguf,
                                                   const Vocabulary& vocabulary) {
  std::vector<BpeMerge> merges;
  merges.reserve(gguf.merges.size());
  for (size_t i = 0; i < gguf.merges.size(); ++i) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(gguf.merges[i], absl::MaxSplits(' ', 1));
    const absl::StatusOr<BpeMerge> merge =
        MakeMerge(vocabulary, pair.first, pair.second, static_cast<int32_t>(i));
    if (!merge.ok()) {
      return Annotate(merge.status(), absl::StrCat("tokenizer.ggml.merges[", i, "]"));
    }
    merges.push_back(*merge);
  }
  return merges;
}

// Sentencepiece merges any two tokens that make a third, the one with the highest
// score first: every way to split a token is a merge of that token's rank.
absl::StatusOr<std::vector<BpeMerge>> MergesOfScores(const GgufVocabulary& gguf,
                                                     const Vocabulary& vocabulary) {
  if (gguf.scores.empty()) {
    return absl::InvalidArgumentError("tokenizer.ggml.scores is missing, which \"llama\" needs");
  }
  if (std::any_of(gguf.scores.begin(), gguf.scores.end(), [](float s) { return std::isnan(s); })) {
    return absl::InvalidArgumentError("tokenizer.ggml.scores holds a NaN");
  }
  const auto is_normal = [&](int32_t id) { return TypeOf(gguf, id) == kNormal; };
  std::vector<int32_t> by_score;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    if (is_normal(id)) by_score.push_back(id);
  }
  std::stable_sort(by_score.begin(), by_score.end(),
                   [&](int32_t a, int32_t b) { return gguf.scores[a] > gguf.scores[b]; });

  std::vector<BpeMerge> merges;
  int32_t rank = 0;
  for (size_t i = 0; i < by_score.size(); ++i) {
    const int32_t id = by_score[i];
    if (i > 0 && gguf.scores[id] < gguf.scores[by_score[i - 1]]) ++rank;
    const absl::string_view text = vocabulary.token(id).text;
    for (size_t cut = 0; cut < text.size();) {
      cut += FirstUtf8Unit(text.substr(cut)).size;
      const std::optional<int32_t> left = vocabulary.IdOf(text.substr(0, cut));
      const std::optional<int32_t> right = vocabulary.IdOf(text.substr(cut));
      if (left && right && is_normal(*left) && is_normal(*right)) {
        merges.push_back({*left, *right, rank, id});
      }
    }
  }
  return merges;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeGgufTokenizer(const GgufVocabulary& gguf) {
  const bool byte_level = gguf.model == "gpt2";
  if (!byte_level && gguf.model != "llama") {
    return absl::UnimplementedError(absl::StrCat("tokenizer.ggml.model \"", gguf.model,
                                                 "\" is not supported; known are gpt2 and llama"));
  }
  RETURN_IF_ERROR(CheckSizes(gguf));

  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  TokenDecoder decoder;
  BpeOptions options;
  bool add_bos = false;
  if (byte_level) {
    ASSIGN_OR_RETURN(const SplitFamily family, FindFamily(gguf.pre));
    if (family.compose) normalizer.Add(Normalizer::Nfc());
    if (gguf.add_space_prefix.value_or(false)) pre_tokenizer.Add(PreTokenizer::PrefixSpace());
    for (const absl::string_view rule : family.rules) {
      ASSIGN_OR_RETURN(Pattern pattern, Pattern::Regex(rule));
      pre_tokenizer.Add(PreTokenizer::Split{std::move(pattern)});
    }
    decoder.byte_level = true;
    options.byte_level = true;
    options.ignore_merges = family.ignore_merges;
    add_bos = family.add_bos;
  } else {
    if (gguf.add_space_prefix.value_or(true)) {
      normalizer.Add(Normalizer::Prepend{std::string(kSpaceMarker)});
      decoder.rule.leading_space = LeadingSpace::kDropOneSpace;
    }
    ASSIGN_OR_RETURN(Pattern space, Pattern::Literal(" "));
    normalizer.Add(Normalizer::Replace{std::move(space), std::string(kSpaceMarker)});
    decoder.byte_fallback = true;
    decoder.rule.replace_each_byte = true;
    options.byte_fallback = true;
    options.fuse_unknown = true;
    add_bos = true;
  }

  ASSIGN_OR_RETURN(Vocabulary vocabulary, MakeVocabulary(gguf, decoder));
  ASSIGN_OR_RETURN(vocabulary.bos_id,
                   SpecialId(gguf.bos_id, "tokenizer.ggml.bos_token_id", &vocabulary));
  ASSIGN_OR_RETURN(const std::optional<int32_t> eos_id,
                   SpecialId(gguf.eos_id, "tokenizer.ggml.eos_token_id", &vocabulary));
  ASSIGN_OR_RETURN(const std::optional<int32_t> eot_id,
                   SpecialId(gguf.eot_id, "tokenizer.ggml.eot_token_id", &vocabulary));
  ASSIGN_OR_RETURN(const std::optional<int32_t> unknown_id,
                   SpecialId(gguf.unknown_id, "tokenizer.ggml.unknown_token_id", &vocabulary));
  for (const std::optional<int32_t>& id : {eos_id, eot_id}) {
    if (id.has_value()) vocabulary.eos_ids.push_back(*id);
  }
  if (!byte_level) options.unknown_id = unknown_id;

  std::vector<int32_t> prefix_ids;
  std::vector<int32_t> suffix_ids;
  if (gguf.add_bos.value_or(add_bos) && vocabulary.bos_id) prefix_ids = {*vocabulary.bos_id};
  if (gguf.add_eos.value_or(false) && eos_id) suffix_ids = {*eos_id};

  std::vector<AddedToken> added_tokens;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    if (IsAdded(TypeOf(gguf, id))) {
      added_tokens.push_back({.id = id, .content = vocabulary.token(id).text});
    }
  }
  ASSIGN_OR_RETURN(const std::vector<BpeMerge> merges,
                   byte_level ? MergesOfList(gguf, vocabulary) : MergesOfScores(gguf, vocabulary));
  BpeModel model(vocabulary, merges, options);
  return std::make_unique<BpeTokenizer>(BpeTokenizer::Parts{
      std::move(vocabulary), std::move(added_tokens), std::move(normalizer),
      std::move(pre_tokenizer), std::move(model), std::move(prefix_ids), std::move(suffix_ids)});
}

}  // namespace heddle
