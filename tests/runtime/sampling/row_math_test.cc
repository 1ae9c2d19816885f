// exp, log, the random numbers and the sums that sampling rests on.
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/sampling/exact_math.h"
#include "runtime/sampling/philox.h"
#include "runtime/sampling/row_sums.h"

namespace heddle {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(ExactMath, ExpIsWithinTwoUlp) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> wide(-708.0, 0.0);
  std::uniform_real_distribution<double> narrow(-2.0, 0.0);
  for (int i = 0; i < 200000; ++i) {
    const double x = i % 2 == 0 ? wide(random) : narrow(random);
    const double expected = std::exp(x);
    ASSERT_NEAR(ExactExp(x) / expected, 1.0, 4.5e-16) << x;
  }
}

TEST(ExactMath, ExpOfTheEdges) {
  EXPECT_EQ(ExactExp(0.0), 1.0);
  EXPECT_EQ(ExactExp(-0.0), 1.0);
  EXPECT_EQ(ExactExp(-709.0), 0.0);
  EXPECT_EQ(ExactExp(-1e300), 0.0);
  EXPECT_EQ(ExactExp(-std::numeric_limits<double>::infinity()), 0.0);
  EXPECT_GT(ExactExp(-708.0), 0.0);
}

TEST(ExactMath, LogIsWithinTwoUlp) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> exponent(-1000.0, 1000.0);
  std::uniform_real_distribution<double> near_one(0.5, 2.0);
  for (int i = 0; i < 200000; ++i) {
    const double x = i % 2 == 0 ? std::exp2(exponent(random)) : near_one(random);
    const double expected = std::log(x);
    ASSERT_NEAR(ExactLog(x), expected, 4.5e-16 * std::max(std::abs(expected), 1e-3)) << x;
  }
  EXPECT_EQ(ExactLog(1.0), 0.0);
  EXPECT_DOUBLE_EQ(ExactLog(1.0 - 0x1p-53), -0x1p-53);
}

// The vectors that the authors of Philox publish with their code.
TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, ~uint64_t{0}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RowSums, LogSumExpAgreesWithLongDouble) {
  std::mt19937 random(3);
  for (const int64_t size : {1, 5, 31, 33, 259, 1023, 1024, 1025, 5000}) {
    std::vector<float> logits(size);
    for (float& x : logits) x = std::normal_distribution<float>(0.0f, 8.0f)(random);
    long double sum = 0.0L;
    for (const float x : logits) sum += std::exp(static_cast<long double>(x));
    const std::vector<BlockSum> blocks = SumBlocks(logits, 1.0);
    EXPECT_EQ(static_cast<int64_t>(blocks.size()), NumBlocks(size));
    EXPECT_NEAR(LogSumExp(blocks), static_cast<double>(std::log(sum)), 1e-13) << size;
  }
}

TEST(RowSums, SlicesAtBlocksGiveTheBlocksOfTheWhole) {
  std::mt19937 random(4);
  std::vector<float> logits(4 * 1024 + 17);
  for (float& x : logits) x = std::normal_distribution<float>(0.0f, 5.0f)(random);
  const std::vector<BlockSum> whole = SumBlocks(logits, 0.7);
  std::vector<BlockSum> parts;
  const std::span<const float> all = logits;
  for (const auto& [begin, end] :
       {std::pair<size_t, size_t>{0, 1024}, {1024, 1024}, {1024, 4113}}) {
    const std::vector<BlockSum> part = SumBlocks(all.subspan(begin, end - begin), 0.7);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  ASSERT_EQ(parts.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(parts[i].max, whole[i].max);
    EXPECT_EQ(parts[i].sum, whole[i].sum);
  }
}

TEST(RowSums, MaskedLogitsAddNothing) {
  std::vector<float> logits(3000, -kInfinity);
  EXPECT_EQ(LogSumExp(SumBlocks(logits, 1.0)), -kInfinity);
  logits[2000] = 3.0f;
  EXPECT_EQ(LogSumExp(SumBlocks(logits, 1.0)), 3.0);
  EXPECT_EQ(TotalOf(SumBlocks(logits, 1e4), 3.0f, 1e4), 1.0);
}

TEST(RowSums, ExtremeLogitsNeitherOverflowNorVanish) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> logits = {max, -max, max, 0.0f};
  EXPECT_EQ(TotalOf(SumBlocks(logits, 1.0), max, 1.0), 2.0);
  EXPECT_TRUE(std::isfinite(LogSumExp(SumBlocks(logits, 1.0))));
}

TEST(RowSums, FindsWhatIsNotFinite) {
  for (const int64_t size : {1, 5, 16, 31, 33, 259}) {
    std::vector<float> logits(size, 1.0f);
    EXPECT_EQ(FirstNotFinite(logits), -1);
    for (const int64_t at : {int64_t{0}, size / 2, size - 1}) {
      for (const float bad : {std::nanf(""), kInfinity, -kInfinity}) {
        std::vector<float> poisoned = logits;
        poisoned[at] = bad;
        poisoned[size - 1] = std::isfinite(poisoned[size - 1]) ? 0.0f : poisoned[size - 1];
        EXPECT_EQ(FirstNotFinite(poisoned), at) << size;
      }
    }
  }
  EXPECT_EQ(FirstNotFinite({}), -1);
}

TEST(RowSums, WholeBlocks) {
  EXPECT_TRUE(BlocksAreWhole(std::vector<Range>{{0, 5}}));
  EXPECT_TRUE(BlocksAreWhole(std::vector<Range>{{0, 2048}, {2048, 2048}, {2048, 2050}}));
  EXPECT_TRUE(BlocksAreWhole(std::vector<Range>{{0, 5}, {5, 5}}));
  EXPECT_FALSE(BlocksAreWhole(std::vector<Range>{{0, 130}, {130, 259}}));
}

}  // namespace
}  // namespace heddle
