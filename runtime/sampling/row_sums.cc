#include "runtime/sampling/row_sums.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "runtime/sampling/exact_math.h"

namespace heddle {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
// Independent lanes, so that the loops below become vector instructions.
constexpr int64_t kLanes = 16;

}  // namespace

bool BlocksAreWhole(std::span<const Range> vocab_shards) {
  return std::all_of(vocab_shards.begin(), vocab_shards.end(), [](const Range& shard) {
    return shard.empty() || shard.begin % kVocabularyBlock == 0;
  });
}

float RowMax(std::span<const float> logits) {
  std::array<float, kLanes> lanes;
  lanes.fill(kNegativeInfinity);
  const int64_t size = static_cast<int64_t>(logits.size());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = logits[i + lane] > lanes[lane] ? logits[i + lane] : lanes[lane];
    }
  }
  for (; i < size; ++i) lanes[0] = std::max(lanes[0], logits[i]);
  return *std::max_element(lanes.begin(), lanes.end());
}

int64_t FirstNotFinite(std::span<const float> logits) {
  // x - x is zero exactly for finite x, NaN else; a NaN in a sum stays.
  std::array<float, kLanes> lanes{};
  const int64_t size = static_cast<int64_t>(logits.size());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += logits[i + lane] - logits[i + lane];
    }
  }
  for (; i < size; ++i) lanes[0] += logits[i] - logits[i];
  if (std::none_of(lanes.begin(), lanes.end(), [](float x) { return x != 0.0f; })) return -1;
  return std::find_if(logits.begin(), logits.end(), [](float x) { return !std::isfinite(x); }) -
         logits.begin();
}

namespace {

// The sum of exp((logit - max) * scale) over at most kVocabularyBlock logits: lane i adds every
// kLanes-th term, then the lanes are added in order.
double SumOfBlock(std::span<const float> block, double max, double scale) {
  std::array<double, kVocabularyBlock> terms;
  std::array<double, kLanes> lanes{};
  const int64_t size = static_cast<int64_t>(block.size());
  for (int64_t i = 0; i < size; ++i) terms[i] = ExactExp((block[i] - max) * scale);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += terms[i + lane];
  }
  for (; i < size; ++i) lanes[i % kLanes] += terms[i];
  return std::accumulate(lanes.begin(), lanes.end(), 0.0);
}

}  // namespace

std::vector<BlockSum> SumBlocks(std::span<const float> logits, double scale) {
  const int64_t size = static_cast<int64_t>(logits.size());
  std::vector<BlockSum> blocks;
  blocks.reserve(NumBlocks(size));
  for (int64_t begin = 0; begin < size; begin += kVocabularyBlock) {
    const std::span<const float> block =
        logits.subspan(begin, std::min(kVocabularyBlock, size - begin));
    BlockSum result{.max = RowMax(block)};
    if (result.max != kNegativeInfinity) result.sum = SumOfBlock(block, result.max, scale);
    blocks.push_back(result);
  }
  return blocks;
}

double TotalOf(std::span<const BlockSum> blocks, float reference, double scale) {
  double total = 0.0;
  for (const BlockSum& block : blocks) {
    total += block.sum * ExactExp((double{block.max} - reference) * scale);
  }
  return total;
}

double LogSumExp(std::span<const BlockSum> blocks) {
  float max = kNegativeInfinity;
  for (const BlockSum& block : blocks) max = std::max(max, block.max);
  if (max == kNegativeInfinity) return max;
  return max + ExactLog(TotalOf(blocks, max, 1.0));
}

}  // namespace heddle
