// libsentencepiece, without its header: that declares absl::string_view in a way
// that contradicts Abseil's own, so no file may include both.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace heddle {

// Immutable and thread-safe once loaded.
class SentencePieceModel {
 public:
  enum class Kind { kNormal, kControl, kUnknown, kByte };

  SentencePieceModel();
  ~SentencePieceModel();

  // These return the reason of a failure, or nothing.
  std::string Load(std::string_view serialized);
  std::string Encode(std::string_view text, std::vector<int>* ids) const;
  std::string Decode(const std::vector<int>& ids, std::string* text) const;

  int size() const;
  std::string Piece(int id) const;
  Kind KindOf(int id) const;
  int bos_id() const;  // -1 where there is none.
  int eos_id() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
