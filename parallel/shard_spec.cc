#include "parallel/shard_spec.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/ceil_div.h"
#include "kernels/base/logging.h"

namespace heddle {

Range SplitEvenly(int64_t total, int num_parts, int part) {
  CHECK_GE(total, 0);
  CHECK_GT(num_parts, 0);
  CHECK(0 <= part && part < num_parts) << "part " << part << " of " << num_parts;
  const int64_t base = total / num_parts;
  const int64_t remainder = total % num_parts;
  const int64_t begin = part * base + std::min<int64_t>(part, remainder);
  return {begin, begin + base + (part < remainder ? 1 : 0)};
}

Range SplitInBlocks(int64_t total, int64_t block, int num_parts, int part) {
  CHECK_GT(block, 0);
  const Range blocks = SplitEvenly(CeilDiv(total, block), num_parts, part);
  return {std::min(blocks.begin * block, total), std::min(blocks.end * block, total)};
}

Range SplitVocabulary(int64_t vocab_size, int num_parts, int part) {
  const bool large = vocab_size >= num_parts * kVocabularyBlock;
  return SplitInBlocks(vocab_size, large ? kVocabularyBlock : 1, num_parts, part);
}

absl::StatusOr<std::vector<Range>> SplitFfn(const FfnShape& ffn,
                                            std::span<const int64_t> attention_bytes) {
  if (ffn.num_columns < 1 || ffn.block_columns < 1 || !(ffn.bytes_per_column > 0) ||
      !std::isfinite(ffn.bytes_per_column)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an FFN of ", ffn.num_columns, " columns in blocks of ", ffn.block_columns, " at ",
        ffn.bytes_per_column, " bytes a column cannot be split: all three ", "must be positive"));
  }
  if (attention_bytes.empty()) {
    return absl::InvalidArgumentError("an FFN cannot be split over no ranks");
  }
  // Dealt out in units, each to the rank that holds least so far. With units of one size this
  // leaves the largest share as small as any deal could.
  const bool cuts = ffn.may_cut_blocks && CeilDiv(ffn.num_columns, ffn.block_columns) <
                                              static_cast<int64_t>(attention_bytes.size());
  const int64_t unit = cuts ? 1 : ffn.block_columns;
  std::vector<double> bytes(attention_bytes.begin(), attention_bytes.end());
  std::vector<int64_t> num_units(bytes.size(), 0);
  for (int64_t left = CeilDiv(ffn.num_columns, unit); left > 0; --left) {
    const auto least = std::min_element(bytes.begin(), bytes.end()) - bytes.begin();
    bytes[least] += ffn.bytes_per_column * static_cast<double>(unit);
    ++num_units[least];
  }
  std::vector<Range> columns;
  int64_t begin = 0;
  for (const int64_t units : num_units) {
    const int64_t end = std::min(begin + units * unit, ffn.num_columns);
    columns.push_back({begin, end});
    begin = end;
  }
  return columns;
}

BlockCover CoverWithBlocks(Range range, int64_t block, int64_t total) {
  CHECK_GT(block, 0);
  CHECK(0 <= range.begin && range.begin <= range.end && range.end <= total)
      << "[" << range.begin << ", " << range.end << ") of " << total;
  if (range.empty()) return {range, 0};
  const int64_t begin = range.begin / block * block;
  return {{begin, std::min(CeilDiv(range.end, block) * block, total)}, range.begin - begin};
}

}  // namespace heddle
