#include "runtime/cpu_share.h"

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(FairThreads, CpusOfOneRankAreItsOwn) {
  EXPECT_EQ(FairThreads({{0, {0, 1, 2, 3}}}, 0), 4);
  EXPECT_EQ(FairThreads({{0, {0, 1}}, {0, {2, 3, 4}}}, 0), 2);
  EXPECT_EQ(FairThreads({{0, {0, 1}}, {0, {2, 3, 4}}}, 1), 3);
}

TEST(FairThreads, SharedCpusAreSplit) {
  const std::vector<RankCpus> two(2, {0, {0, 1, 2, 3}});
  EXPECT_EQ(FairThreads(two, 0), 2);
  const std::vector<RankCpus> three(3, {0, {0, 1, 2, 3}});
  EXPECT_EQ(FairThreads(three, 2), 1);
  // Two of its own, and half of two shared ones.
  EXPECT_EQ(FairThreads({{0, {0, 1, 2, 3}}, {0, {2, 3}}}, 0), 3);
}

TEST(FairThreads, RanksThatOutnumberTheCpusHaveOneEach) {
  const std::vector<RankCpus> crowd(8, {0, {0, 1}});
  EXPECT_EQ(FairThreads(crowd, 5), 1);
}

TEST(FairThreads, OtherNodesDoNotCount) {
  EXPECT_EQ(FairThreads({{0, {0, 1}}, {1, {0, 1}}}, 0), 2);
}

}  // namespace
}  // namespace heddle
