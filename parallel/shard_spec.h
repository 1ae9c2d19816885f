// How rows, columns, experts and vocabulary are dealt to ranks. With kv_grid.h the only place that
// holds a partition formula: loader, cache and kernels receive its results.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace heddle {

// Half-open, in global indexes. Empty ranges are legal everywhere.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
  bool Contains(int64_t index) const { return begin <= index && index < end; }
  // From units to their elements: heads to rows, with `factor` = head_dim.
  Range ScaledBy(int64_t factor) const { return {begin * factor, end * factor}; }
  friend bool operator==(const Range&, const Range&) = default;
};

// How one tensor lies over the ranks of a group.
struct ShardSpec {
  enum class Kind : uint8_t {
    kMirrored,  // each rank holds all of it
    kSplit,     // each rank holds `range` of `axis`
    kPartial,   // each rank holds a summand; an AllReduce makes it whole
  };

  Kind kind = Kind::kMirrored;
  int axis = 0;  // kSplit only: 0 = rows (output features), 1 = columns (input features)
  Range range;   // kSplit only: this rank's part of the axis

  static ShardSpec Mirrored() { return {}; }
  static ShardSpec Split(int axis, Range range) { return {Kind::kSplit, axis, range}; }
  static ShardSpec Partial() { return {Kind::kPartial, 0, {}}; }
};

// The `part`-th of `num_parts` contiguous shares of [0, total); sizes differ by at most one, the
// lowest parts take the remainder. Experts and heads are dealt this way.
Range SplitEvenly(int64_t total, int num_parts, int part);

// As SplitEvenly, in whole blocks of `block` elements; only the very last block may be short.
Range SplitInBlocks(int64_t total, int64_t block, int num_parts, int part);

// Vocabulary: whole blocks of kVocabularyBlock ids when every rank gets at least one, so that sums
// over such a block stay on one rank; plainly even below that.
inline constexpr int64_t kVocabularyBlock = 1024;
Range SplitVocabulary(int64_t vocab_size, int num_parts, int part);

// The columns of a gated FFN (rows of gate and up, columns of down) of one layer.
struct FfnShape {
  int64_t num_columns = 0;
  // Columns that one quantisation block spans: from the format, never derived from a width.
  int64_t block_columns = 1;
  // Whether a block can be shared: its scales lie apart, so that both neighbours read them.
  bool may_cut_blocks = false;
  // Weight bytes of a column over gate, up and down together.
  double bytes_per_column = 0;
};

// Deals the columns at whole blocks so that the largest `attention_bytes[rank]` plus FFN bytes is
// as small as can be: ranks that hold fewer heads take more columns. Fewer blocks than ranks are
// cut anywhere if they may be. Contiguous in rank order. InvalidArgument unless all counts are
// positive and there is a rank.
absl::StatusOr<std::vector<Range>> SplitFfn(const FfnShape& ffn,
                                            std::span<const int64_t> attention_bytes);

// What must be read so that `range` is whole when storage is only addressable in blocks: a block
// that a boundary cuts is read by both neighbours.
struct BlockCover {
  Range stored;              // block-aligned, clipped to [0, total)
  int64_t start_offset = 0;  // of `range` inside `stored`
};
BlockCover CoverWithBlocks(Range range, int64_t block, int64_t total);

}  // namespace heddle
