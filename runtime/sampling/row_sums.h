// The softmax denominator of a row of logits, summed in an order that no sharding changes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/shard_spec.h"

namespace heddle {

// Ids [1024 i, 1024 (i + 1)) of a row: the sum, in an order of its own, of
// exp((logit - max) * scale).
struct BlockSum {
  float max = 0.0f;  // -infinity where every logit is
  double sum = 0.0;
};

inline int64_t NumBlocks(int64_t num_ids) {
  return (num_ids + kVocabularyBlock - 1) / kVocabularyBlock;
}
// Whether each block lies on one rank, so that ranks can sum their own.
bool BlocksAreWhole(std::span<const Range> vocab_shards);

// [NumBlocks] of `logits`, which begin at a block's start. No NaN or +infinity.
std::vector<BlockSum> SumBlocks(std::span<const float> logits, double scale);

// Of all blocks of a row in ascending order: the sum of exp((logit - reference) * scale), where
// `reference` is the row's largest logit.
double TotalOf(std::span<const BlockSum> blocks, float reference, double scale);
// log(sum of exp(logit)), of blocks with scale 1.
double LogSumExp(std::span<const BlockSum> blocks);

// Of the first NaN or infinity; -1 if there is none.
int64_t FirstNotFinite(std::span<const float> logits);

// The largest of a row without NaN; -infinity for an empty one.
float RowMax(std::span<const float> logits);

}  // namespace heddle
