#include "runtime/text/bpe_model.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "runtime/text/byte_alphabet.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// A symbol of the word, linked to its neighbours by index.
struct Symbol {
  int32_t id;  // -1 once it has become part of its left neighbour.
  int32_t previous;
  int32_t next;
};

// A merge that was possible when it was queued.
struct Candidate {
  int32_t rank;
  int32_t position;
  int32_t result;

  // For std::push_heap, which keeps the greatest on top.
  bool operator<(const Candidate& other) const {
    return std::pair(rank, position) > std::pair(other.rank, other.position);
  }
};

}  // namespace

absl::StatusOr<BpeMerge> MakeMerge(const Vocabulary& vocabulary, absl::string_view left,
                                   absl::string_view right, int32_t rank) {
  const std::string joined = absl::StrCat(left, right);
  const std::optional<int32_t> left_id = vocabulary.IdOf(left);
  const std::optional<int32_t> right_id = vocabulary.IdOf(right);
  const std::optional<int32_t> joined_id = vocabulary.IdOf(joined);
  if (left_id && right_id && joined_id) return BpeMerge{*left_id, *right_id, rank, *joined_id};
  const absl::string_view missing = !left_id ? left : !right_id ? right : joined;
  return absl::InvalidArgumentError(absl::StrCat("the merge of \"", left, "\" and \"", right,
                                                 "\" needs the token \"", missing,
                                                 "\", which the vocabulary lacks"));
}

BpeModel::BpeModel(const Vocabulary& vocabulary, const std::vector<BpeMerge>& merges,
                   BpeOptions options)
    : options_(options) {
  merges_.reserve(merges.size());
  for (const BpeMerge& merge : merges) {
    merges_[PairKey(merge.left, merge.right)] = {merge.rank, merge.result};
  }
  id_of_byte_.fill(-1);
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    const std::string& text = vocabulary.token(id).text;
    if (text.empty()) continue;
    if (options_.byte_level) {
      const std::optional<std::string> bytes = BytesOfLetters(text);
      if (!bytes.has_value()) continue;
      if (bytes->size() == 1) id_of_byte_[static_cast<uint8_t>((*bytes)[0])] = id;
      if (options_.ignore_merges) id_of_word_[*bytes] = id;
      continue;
    }
    if (const std::optional<uint8_t> byte = ByteOfToken(text)) id_of_byte_[*byte] = id;
    if (FirstUtf8Unit(text).size == text.size()) id_of_code_point_[CodePoint(text)] = id;
    if (options_.ignore_merges) id_of_word_[text] = id;
  }
}

const BpeModel::Result* BpeModel::FindMerge(int32_t left, int32_t right) const {
  const auto found = merges_.find(PairKey(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

bool BpeModel::AppendByteTokens(absl::string_view bytes, std::vector<int32_t>* ids) const {
  const auto id_of = [&](char byte) { return id_of_byte_[static_cast<uint8_t>(byte)]; };
  if (std::any_of(bytes.begin(), bytes.end(), [&](char byte) { return id_of(byte) < 0; })) {
    return false;
  }
  for (const char byte : bytes) ids->push_back(id_of(byte));
  return true;
}

void BpeModel::AppendSymbols(absl::string_view word, std::vector<int32_t>* ids) const {
  // An unknown character is kept back until the next known one, so that it can
  // fuse with those that follow; bytes of the fallback overtake it, as they do in
  // Hugging Face's tokenizers.
  bool has_unknown = false;
  const auto flush_unknown = [&] {
    if (std::exchange(has_unknown, false)) ids->push_back(*options_.unknown_id);
  };
  while (!word.empty()) {
    const absl::string_view symbol =
        word.substr(0, options_.byte_level ? 1 : FirstUtf8Unit(word).size);
    word.remove_prefix(symbol.size());
    int32_t id = -1;
    if (options_.byte_level) {
      id = id_of_byte_[static_cast<uint8_t>(symbol[0])];
    } else if (const auto found = id_of_code_point_.find(CodePoint(symbol));
               found != id_of_code_point_.end()) {
      id = found->second;
    }
    if (id >= 0) {
      flush_unknown();
      ids->push_back(id);
    } else if (options_.byte_fallback && AppendByteTokens(symbol, ids)) {
      continue;
    } else if (options_.unknown_id.has_value()) {
      if (!options_.fuse_unknown) flush_unknown();
      has_unknown = true;
    }
  }
  flush_unknown();
}

void BpeModel::Encode(absl::string_view word, std::vector<int32_t>* ids) const {
  if (options_.ignore_merges) {
    if (const auto found = id_of_word_.find(word); found != id_of_word_.end()) {
      ids->push_back(found->second);
      return;
    }
  }
  const size_t first = ids->size();
  AppendSymbols(word, ids);
  const auto num_symbols = static_cast<int32_t>(ids->size() - first);

  absl::InlinedVector<Symbol, 32> symbols;
  for (int32_t i = 0; i < num_symbols; ++i) {
    symbols.push_back({(*ids)[first + i], i - 1, i + 1 < num_symbols ? i + 1 : -1});
  }
  absl::InlinedVector<Candidate, 32> queue;
  const auto enqueue = [&](int32_t position) {
    const Symbol& left = symbols[position];
    if (const Result* merge = FindMerge(left.id, symbols[left.next].id)) {
      queue.push_back({merge->rank, position, merge->id});
      std::push_heap(queue.begin(), queue.end());
    }
  };
  for (int32_t i = 0; i + 1 < num_symbols; ++i) enqueue(i);

  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end());
    const Candidate best = queue.back();
    queue.pop_back();
    Symbol& left = symbols[best.position];
    if (left.id < 0 || left.next < 0) continue;
    Symbol& right = symbols[left.next];
    // Either symbol may have changed since the candidate was queued.
    const Result* merge = FindMerge(left.id, right.id);
    if (merge == nullptr || merge->id != best.result) continue;

    left.id = best.result;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) {
      symbols[left.next].previous = best.position;
      enqueue(best.position);
    }
    if (left.previous >= 0) enqueue(left.previous);
  }

  ids->resize(first);
  for (int32_t i = num_symbols > 0 ? 0 : -1; i >= 0; i = symbols[i].next) {
    ids->push_back(symbols[i].id);
  }
}

}  // namespace heddle
