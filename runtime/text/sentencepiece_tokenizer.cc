// A bare tokenizer.model: libsentencepiece encodes, our stream decoder decodes.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/sentencepiece_model.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/tokenizer_config.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(Vocabulary vocabulary, std::unique_ptr<const SentencePieceModel> model,
                         std::vector<int32_t> prefix_ids, std::vector<int32_t> suffix_ids)
      : Tokenizer(std::move(vocabulary)),
        model_(std::move(model)),
        prefix_ids_(std::move(prefix_ids)),
        suffix_ids_(std::move(suffix_ids)) {}

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              bool add_special_tokens) const override {
    std::vector<int> encoded;
    const std::string error = model_->Encode(ToValidUtf8(text), &encoded);
    if (!error.empty()) return absl::InternalError(absl::StrCat("sentencepiece: ", error));
    std::vector<int32_t> ids;
    if (add_special_tokens) ids = prefix_ids_;
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    if (add_special_tokens) ids.insert(ids.end(), suffix_ids_.begin(), suffix_ids_.end());
    return ids;
  }

 private:
  const std::unique_ptr<const SentencePieceModel> model_;
  const std::vector<int32_t> prefix_ids_;
  const std::vector<int32_t> suffix_ids_;
};

Token MakeToken(const SentencePieceModel& model, int id) {
  Token token;
  token.text = model.Piece(id);
  switch (model.KindOf(id)) {
    case SentencePieceModel::Kind::kControl:
      token.bytes = token.text;
      token.special = true;
      break;
    case SentencePieceModel::Kind::kUnknown:
      token.bytes = " \xE2\x81\x87 ";  // The library's stand-in, U+2047 between spaces.
      break;
    case SentencePieceModel::Kind::kByte:
      if (const std::optional<uint8_t> byte = ByteOfToken(token.text)) {
        token.bytes = std::string(1, static_cast<char>(*byte));
      }
      break;
    case SentencePieceModel::Kind::kNormal:
      token.bytes = absl::StrReplaceAll(token.text, {{kSpaceMarker, " "}});
      break;
  }
  return token;
}

// The model says how it decodes leading markers only by doing it.
absl::StatusOr<LeadingSpace> FindLeadingSpace(const SentencePieceModel& model,
                                              const Vocabulary& vocabulary) {
  std::optional<int32_t> marked = vocabulary.IdOf(kSpaceMarker);
  for (int32_t id = 0; !marked.has_value() && id < vocabulary.size(); ++id) {
    if (model.KindOf(id) == SentencePieceModel::Kind::kNormal &&
        absl::StartsWith(vocabulary.token(id).text, kSpaceMarker)) {
      marked = id;
    }
  }
  if (!marked.has_value()) return LeadingSpace::kKeep;
  std::string text;
  const std::string error = model.Decode({*marked, *marked}, &text);
  if (!error.empty()) return absl::InternalError(absl::StrCat("sentencepiece: ", error));
  const size_t num_dropped = 2 * vocabulary.token(*marked).bytes.size() - text.size();
  return num_dropped == 0   ? LeadingSpace::kKeep
         : num_dropped == 1 ? LeadingSpace::kDropOneMarker
                            : LeadingSpace::kDropOneMarkerEach;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseSentencePiece(absl::string_view model,
                                                              absl::string_view tokenizer_config) {
  auto loaded = std::make_unique<SentencePieceModel>();
  const std::string error = loaded->Load({model.data(), model.size()});
  if (!error.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer.model: not a model: ", error));
  }
  Vocabulary vocabulary;
  for (int id = 0; id < loaded->size(); ++id) {
    RETURN_IF_ERROR(Annotate(vocabulary.Add(id, MakeToken(*loaded, id)), "tokenizer.model"));
  }
  vocabulary.decode_rule.replace_each_byte = true;
  ASSIGN_OR_RETURN(vocabulary.decode_rule.leading_space, FindLeadingSpace(*loaded, vocabulary));

  ASSIGN_OR_RETURN(TokenizerConfig config, ParseTokenizerConfig(tokenizer_config));
  if (!config.bos && loaded->bos_id() >= 0) config.bos = loaded->Piece(loaded->bos_id());
  if (!config.eos && loaded->eos_id() >= 0) config.eos = loaded->Piece(loaded->eos_id());
  if (!config.add_bos) config.add_bos = config.bos.has_value();
  std::vector<int32_t> prefix_ids;
  std::vector<int32_t> suffix_ids;
  RETURN_IF_ERROR(ApplyTokenizerConfig(config, &vocabulary, &prefix_ids, &suffix_ids));
  return std::make_unique<SentencePieceTokenizer>(std::move(vocabulary), std::move(loaded),
                                                  std::move(prefix_ids), std::move(suffix_ids));
}

}  // namespace heddle
