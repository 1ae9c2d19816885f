#include "runtime/text/sentencepiece_model.h"

#include <sentencepiece_processor.h>

namespace heddle {
namespace {

std::string Reason(const sentencepiece::util::Status& status) {
  return status.ok() ? "" : status.ToString();
}

}  // namespace

struct SentencePieceModel::Impl {
  sentencepiece::SentencePieceProcessor processor;
};

SentencePieceModel::SentencePieceModel() : impl_(std::make_unique<Impl>()) {}
SentencePieceModel::~SentencePieceModel() = default;

std::string SentencePieceModel::Load(std::string_view serialized) {
  return Reason(impl_->processor.LoadFromSerializedProto(serialized));
}

std::string SentencePieceModel::Encode(std::string_view text, std::vector<int>* ids) const {
  return Reason(impl_->processor.Encode(text, ids));
}

std::string SentencePieceModel::Decode(const std::vector<int>& ids, std::string* text) const {
  return Reason(impl_->processor.Decode(ids, text));
}

int SentencePieceModel::size() const { return impl_->processor.GetPieceSize(); }

std::string SentencePieceModel::Piece(int id) const { return impl_->processor.IdToPiece(id); }

SentencePieceModel::Kind SentencePieceModel::KindOf(int id) const {
  if (impl_->processor.IsControl(id)) return Kind::kControl;
  if (impl_->processor.IsUnknown(id)) return Kind::kUnknown;
  if (impl_->processor.IsByte(id)) return Kind::kByte;
  return Kind::kNormal;
}

int SentencePieceModel::bos_id() const { return impl_->processor.bos_id(); }
int SentencePieceModel::eos_id() const { return impl_->processor.eos_id(); }

}  // namespace heddle
