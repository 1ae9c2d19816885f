#include "runtime/text/pipeline_json.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/byte_alphabet.h"

namespace heddle {
namespace {

absl::StatusOr<std::string> StringOf(const JsonValue& value, absl::string_view key) {
  ASSIGN_OR_RETURN(const JsonValue member, value.Get(key));
  ASSIGN_OR_RETURN(const absl::string_view text, member.String());
  return std::string(text);
}

absl::Status UnknownType(const JsonValue& value, absl::string_view type, absl::string_view known) {
  return value.Unsupported(
      absl::StrCat("type \"", type, "\" is not supported here; known are ", known));
}

// One kind of step in order, Sequences (whose steps lie under `key`) taken apart.
absl::StatusOr<std::vector<JsonValue>> StepsOf(const std::optional<JsonValue>& value,
                                               absl::string_view key) {
  std::vector<JsonValue> steps;
  if (!value.has_value()) return steps;
  ASSIGN_OR_RETURN(const std::string type, StringOf(*value, "type"));
  if (type != "Sequence") {
    steps.push_back(*value);
    return steps;
  }
  ASSIGN_OR_RETURN(const JsonValue sequence, value->Get(key));
  ASSIGN_OR_RETURN(const std::vector<JsonValue> elements, sequence.Elements());
  for (const JsonValue& element : elements) {
    ASSIGN_OR_RETURN(const std::vector<JsonValue> inner, StepsOf(element, key));
    steps.insert(steps.end(), inner.begin(), inner.end());
  }
  return steps;
}

// {"String": text} or {"Regex": expression}.
absl::StatusOr<Pattern> ParsePattern(const JsonValue& step) {
  ASSIGN_OR_RETURN(const JsonValue pattern, step.Get("pattern"));
  const std::optional<JsonValue> literal = pattern.Find("String");
  const std::optional<JsonValue> regex = pattern.Find("Regex");
  if (literal.has_value() == regex.has_value()) {
    return pattern.Invalid("must be either {\"String\": …} or {\"Regex\": …}");
  }
  ASSIGN_OR_RETURN(const absl::string_view text, (literal.has_value() ? literal : regex)->String());
  absl::StatusOr<Pattern> compiled =
      literal.has_value() ? Pattern::Literal(text) : Pattern::Regex(text);
  if (!compiled.ok()) return pattern.Error(compiled.status().code(), compiled.status().message());
  return compiled;
}

absl::StatusOr<PreTokenizer::Split> ParseSplit(const JsonValue& step) {
  constexpr std::pair<absl::string_view, SplitBehavior> kBehaviors[] = {
      {"Removed", SplitBehavior::kRemoved},
      {"Isolated", SplitBehavior::kIsolated},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous}};
  ASSIGN_OR_RETURN(Pattern pattern, ParsePattern(step));
  ASSIGN_OR_RETURN(const bool invert, step.BoolOr("invert", false));
  ASSIGN_OR_RETURN(const std::string behavior, StringOf(step, "behavior"));
  for (const auto& [name, value] : kBehaviors) {
    if (behavior == name) return PreTokenizer::Split{std::move(pattern), value, invert};
  }
  return step.Unsupported(absl::StrCat("behavior \"", behavior, "\" is not supported"));
}

absl::Status CheckMarker(const JsonValue& step) {
  ASSIGN_OR_RETURN(const std::string marker, StringOf(step, "replacement"));
  if (marker == kSpaceMarker) return absl::OkStatus();
  return step.Unsupported(
      absl::StrCat("replacement \"", marker, "\" is not supported, only \"", kSpaceMarker, "\""));
}

// Where Metaspace puts a marker in front; older files say it with a bool.
absl::StatusOr<PreTokenizer::MarkerPrefix> ParsePrependScheme(const JsonValue& step) {
  ASSIGN_OR_RETURN(const bool add_prefix_space, step.BoolOr("add_prefix_space", true));
  std::string scheme = add_prefix_space ? "always" : "never";
  if (step.Find("prepend_scheme").has_value()) {
    ASSIGN_OR_RETURN(scheme, StringOf(step, "prepend_scheme"));
  }
  if (!add_prefix_space && scheme != "never") {
    return step.Invalid("add_prefix_space and prepend_scheme contradict each other");
  }
  if (scheme == "always") return PreTokenizer::MarkerPrefix::kAlways;
  if (scheme == "first") return PreTokenizer::MarkerPrefix::kFirst;
  if (scheme == "never") return PreTokenizer::MarkerPrefix::kNever;
  return step.Unsupported(absl::StrCat("prepend_scheme \"", scheme, "\" is not supported"));
}

absl::Status AddMetaspace(const JsonValue& step, PreTokenizer* pre_tokenizer) {
  RETURN_IF_ERROR(CheckMarker(step));
  ASSIGN_OR_RETURN(const PreTokenizer::MarkerPrefix prefix, ParsePrependScheme(step));
  ASSIGN_OR_RETURN(const bool split, step.BoolOr("split", true));
  pre_tokenizer->Add(PreTokenizer::MarkSpaces{prefix});
  if (split) {
    ASSIGN_OR_RETURN(Pattern pattern, Pattern::Literal(kSpaceMarker));
    pre_tokenizer->Add(PreTokenizer::Split{std::move(pattern), SplitBehavior::kMergedWithNext});
  }
  return absl::OkStatus();
}

absl::Status AddByteLevel(const JsonValue& step, PreTokenizer* pre_tokenizer) {
  ASSIGN_OR_RETURN(const bool add_prefix_space, step.BoolOr("add_prefix_space", true));
  ASSIGN_OR_RETURN(const bool use_regex, step.BoolOr("use_regex", true));
  if (add_prefix_space) pre_tokenizer->Add(PreTokenizer::PrefixSpace());
  if (use_regex) {
    ASSIGN_OR_RETURN(Pattern rule, Pattern::Regex(kGpt2SplitRule));
    pre_tokenizer->Add(PreTokenizer::Split{std::move(rule)});
  }
  return absl::OkStatus();
}

// That a decoder's Replace turns markers into spaces.
absl::Status CheckMarkerReplaced(const JsonValue& step) {
  ASSIGN_OR_RETURN(const JsonValue pattern, step.Get("pattern"));
  ASSIGN_OR_RETURN(const std::string from, StringOf(pattern, "String"));
  ASSIGN_OR_RETURN(const std::string to, StringOf(step, "content"));
  if (from == kSpaceMarker && to == " ") return absl::OkStatus();
  return step.Unsupported(absl::StrCat("only \"", kSpaceMarker, "\" is replaced, by a space"));
}

// That a decoder's Strip takes one space off the whole text.
absl::Status CheckStrip(const JsonValue& step, bool fused) {
  ASSIGN_OR_RETURN(const std::string content, StringOf(step, "content"));
  ASSIGN_OR_RETURN(const JsonValue start, step.Get("start"));
  ASSIGN_OR_RETURN(const JsonValue stop, step.Get("stop"));
  ASSIGN_OR_RETURN(const int32_t num_start, start.Int32());
  ASSIGN_OR_RETURN(const int32_t num_stop, stop.Int32());
  if (content == " " && num_start == 1 && num_stop == 0 && fused) return absl::OkStatus();
  return step.Unsupported("only one space at the start of the fused text is stripped");
}

// One piece of a TemplateProcessing: {"Sequence": …} or {"SpecialToken": {"id": …}}.
absl::Status AddTemplatePiece(const JsonValue& piece, const JsonValue& processor,
                              bool* seen_sequence, SpecialIds* special) {
  if (const std::optional<JsonValue> sequence = piece.Find("Sequence")) {
    ASSIGN_OR_RETURN(const std::string id, StringOf(*sequence, "id"));
    if (id != "A" || std::exchange(*seen_sequence, true)) {
      return piece.Unsupported("a single text must appear once, as sequence \"A\"");
    }
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const JsonValue token, piece.Get("SpecialToken"));
  ASSIGN_OR_RETURN(const std::string name, StringOf(token, "id"));
  ASSIGN_OR_RETURN(const JsonValue tokens, processor.Get("special_tokens"));
  ASSIGN_OR_RETURN(const JsonValue definition, tokens.Get(name));
  ASSIGN_OR_RETURN(const JsonValue ids, definition.Get("ids"));
  ASSIGN_OR_RETURN(const std::vector<JsonValue> elements, ids.Elements());
  for (const JsonValue& element : elements) {
    ASSIGN_OR_RETURN(const int32_t id, element.Int32());
    (*seen_sequence ? special->suffix : special->prefix).push_back(id);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Normalizer> ParseNormalizer(const JsonValue& root) {
  Normalizer normalizer;
  ASSIGN_OR_RETURN(const std::vector<JsonValue> steps,
                   StepsOf(root.Find("normalizer"), "normalizers"));
  for (const JsonValue& step : steps) {
    ASSIGN_OR_RETURN(const std::string type, StringOf(step, "type"));
    if (type == "NFC") {
      normalizer.Add(Normalizer::Nfc());
    } else if (type == "Prepend") {
      ASSIGN_OR_RETURN(std::string text, StringOf(step, "prepend"));
      normalizer.Add(Normalizer::Prepend{std::move(text)});
    } else if (type == "Replace") {
      ASSIGN_OR_RETURN(Pattern pattern, ParsePattern(step));
      ASSIGN_OR_RETURN(std::string content, StringOf(step, "content"));
      normalizer.Add(Normalizer::Replace{std::move(pattern), std::move(content)});
    } else {
      return UnknownType(step, type, "NFC, Prepend, Replace and Sequence");
    }
  }
  return normalizer;
}

absl::StatusOr<PreTokenization> ParsePreTokenizer(const JsonValue& root) {
  PreTokenization result;
  ASSIGN_OR_RETURN(const std::vector<JsonValue> steps,
                   StepsOf(root.Find("pre_tokenizer"), "pretokenizers"));
  for (const JsonValue& step : steps) {
    if (result.byte_level) return step.Unsupported("a step after ByteLevel is not supported");
    ASSIGN_OR_RETURN(const std::string type, StringOf(step, "type"));
    if (type == "Split") {
      ASSIGN_OR_RETURN(PreTokenizer::Split split, ParseSplit(step));
      result.pre_tokenizer.Add(std::move(split));
    } else if (type == "Digits") {
      ASSIGN_OR_RETURN(const bool individual, step.BoolOr("individual_digits", false));
      ASSIGN_OR_RETURN(Pattern digits, Pattern::Regex(individual ? "\\p{N}" : "\\p{N}+"));
      result.pre_tokenizer.Add(PreTokenizer::Split{std::move(digits)});
    } else if (type == "ByteLevel") {
      RETURN_IF_ERROR(AddByteLevel(step, &result.pre_tokenizer));
      result.byte_level = true;
    } else if (type == "Metaspace") {
      RETURN_IF_ERROR(AddMetaspace(step, &result.pre_tokenizer));
    } else {
      return UnknownType(step, type, "Split, Digits, ByteLevel, Metaspace and Sequence");
    }
  }
  return result;
}

absl::StatusOr<TokenDecoder> ParseDecoder(const JsonValue& root) {
  // A sequence may leave out any of these but the first; the order is fixed.
  constexpr absl::string_view kOrder[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
  constexpr absl::string_view kKnown =
      "ByteLevel, Metaspace and the Sequence of Replace, ByteFallback, Fuse and Strip";
  TokenDecoder decoder;
  ASSIGN_OR_RETURN(const JsonValue value, root.Get("decoder"));
  ASSIGN_OR_RETURN(const std::string whole, StringOf(value, "type"));
  if (whole == "ByteLevel") {
    decoder.byte_level = true;
    return decoder;
  }
  if (whole == "Metaspace") {
    RETURN_IF_ERROR(CheckMarker(value));
    ASSIGN_OR_RETURN(const PreTokenizer::MarkerPrefix prefix, ParsePrependScheme(value));
    if (prefix != PreTokenizer::MarkerPrefix::kNever) {
      decoder.rule.leading_space = LeadingSpace::kDropFirstMarkers;
    }
    return decoder;
  }

  ASSIGN_OR_RETURN(const std::vector<JsonValue> steps, StepsOf(value, "decoders"));
  const absl::string_view* place = std::begin(kOrder);
  bool fused = false;
  for (const JsonValue& step : steps) {
    ASSIGN_OR_RETURN(const std::string type, StringOf(step, "type"));
    const absl::string_view* found = std::find(place, std::end(kOrder), type);
    const bool out_of_place =
        place == std::begin(kOrder) ? type != "Replace" : found == std::end(kOrder);
    if (out_of_place) return UnknownType(step, type, kKnown);
    place = found + 1;
    if (type == "Replace") {
      RETURN_IF_ERROR(CheckMarkerReplaced(step));
    } else if (type == "ByteFallback") {
      decoder.byte_fallback = true;
      decoder.rule.replace_each_byte = true;
    } else if (type == "Fuse") {
      fused = true;
    } else {
      RETURN_IF_ERROR(CheckStrip(step, fused));
      decoder.rule.leading_space = LeadingSpace::kDropOneSpace;
    }
  }
  if (place == std::begin(kOrder)) return UnknownType(value, whole, kKnown);
  return decoder;
}

std::string TokenDecoder::BytesOf(absl::string_view text) const {
  if (byte_level) return BytesOfLetters(text).value_or(std::string(text));
  if (byte_fallback) {
    if (const std::optional<uint8_t> byte = ByteOfToken(text)) {
      return std::string(1, static_cast<char>(*byte));
    }
  }
  return absl::StrReplaceAll(text, {{kSpaceMarker, " "}});
}

absl::StatusOr<SpecialIds> ParsePostProcessor(const JsonValue& root) {
  SpecialIds special;
  bool seen_template = false;
  ASSIGN_OR_RETURN(const std::vector<JsonValue> steps,
                   StepsOf(root.Find("post_processor"), "processors"));
  for (const JsonValue& step : steps) {
    ASSIGN_OR_RETURN(const std::string type, StringOf(step, "type"));
    if (type == "ByteLevel") continue;  // It moves offsets only.
    if (type != "TemplateProcessing" || std::exchange(seen_template, true)) {
      return UnknownType(step, type, "ByteLevel, one TemplateProcessing and Sequence");
    }
    ASSIGN_OR_RETURN(const JsonValue single, step.Get("single"));
    ASSIGN_OR_RETURN(const std::vector<JsonValue> pieces, single.Elements());
    bool seen_sequence = false;
    for (const JsonValue& piece : pieces) {
      RETURN_IF_ERROR(AddTemplatePiece(piece, step, &seen_sequence, &special));
    }
    if (!seen_sequence) return single.Unsupported("a template without the text is not supported");
  }
  return special;
}

}  // namespace heddle
