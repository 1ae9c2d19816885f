// Byte-pair encoding of one word.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/vocabulary.h"

namespace heddle {

// Two tokens that merge into a third. The lowest rank merges first; of equal
// ranks the leftmost.
struct BpeMerge {
  int32_t left = 0;
  int32_t right = 0;
  int32_t rank = 0;
  int32_t result = 0;
};

// The merge of two tokens of `vocabulary` by their texts; fails unless it has them
// and what they make.
absl::StatusOr<BpeMerge> MakeMerge(const Vocabulary& vocabulary, absl::string_view left,
                                   absl::string_view right, int32_t rank);

struct BpeOptions {
  bool byte_level = false;            // Words are bytes, spelled in the vocabulary as letters.
  bool byte_fallback = false;         // Characters without a token become tokens "<0xHH>".
  bool fuse_unknown = false;          // A run of unknown characters is one token.
  bool ignore_merges = false;         // A word that is a token needs no merges.
  std::optional<int32_t> unknown_id;  // Without it, unknown characters are dropped.
};

// Immutable and thread-safe. A word of n characters takes O(n log n) steps.
class BpeModel {
 public:
  // Of equal pairs in `merges` the last counts. `vocabulary` holds the model's own
  // tokens; added ones that it does not know must not be in it.
  BpeModel(const Vocabulary& vocabulary, const std::vector<BpeMerge>& merges, BpeOptions options);

  // Appends the ids of `word`: well-formed UTF-8, or any bytes if byte_level.
  void Encode(absl::string_view word, std::vector<int32_t>* ids) const;

 private:
  struct Result {
    int32_t rank;
    int32_t id;
  };

  const Result* FindMerge(int32_t left, int32_t right) const;
  // The ids of the word's characters or bytes, before any merge.
  void AppendSymbols(absl::string_view word, std::vector<int32_t>* ids) const;
  // Appends one token for each byte, if all of them have one.
  bool AppendByteTokens(absl::string_view bytes, std::vector<int32_t>* ids) const;

  BpeOptions options_;
  absl::flat_hash_map<uint64_t, Result> merges_;             // By left << 32 | right.
  std::array<int32_t, 256> id_of_byte_;                      // -1 where there is none.
  absl::flat_hash_map<uint32_t, int32_t> id_of_code_point_;  // Empty if byte_level.
  absl::flat_hash_map<std::string, int32_t> id_of_word_;     // Only for ignore_merges.
};

}  // namespace heddle
