#include "runtime/cpu_share.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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

TEST(DescribeBinding, ACpuForEachRankIsFine) {
  EXPECT_EQ(DescribeBinding({{0, {0, 1, 2, 3}}}, 0, 4), "");
  EXPECT_EQ(DescribeBinding(std::vector<RankCpus>(2, {0, {0, 1}}), 0, 2), "");
  EXPECT_EQ(DescribeBinding(std::vector<RankCpus>(3, {0, {0, 1, 2}}), 0, 3), "");
  EXPECT_EQ(DescribeBinding({{0, {0}}, {0, {1}}}, 0, 2), "") << "one each, and none idle";
  EXPECT_EQ(DescribeBinding({{0, {0, 1}}, {0, {0, 1}}, {0, {2, 3}}, {0, {2, 3}}}, 0, 4), "");
}

TEST(DescribeBinding, RanksThatShareACpuTakeTurns) {
  EXPECT_THAT(DescribeBinding(std::vector<RankCpus>(3, {0, {0, 1}}), 0, 2),
              AllOf(HasSubstr("3 rank(s) of this node may use 2 of its 2 CPUs"),
                    HasSubstr("3 of them have less than one each"), Not(HasSubstr("--bind-to"))));
  // The first has one of its own besides.
  EXPECT_THAT(DescribeBinding({{0, {0, 1}}, {0, {0}}, {0, {2}}}, 0, 3),
              HasSubstr("and 1 of them have less than one each"));
}

TEST(DescribeBinding, IdleCpusAreNamedWithTheRemedy) {
  EXPECT_THAT(DescribeBinding({{0, {0}}, {0, {1}}}, 0, 64),
              AllOf(HasSubstr("2 rank(s) of this node may use 2 of its 64 CPUs"),
                    HasSubstr("--bind-to none"), Not(HasSubstr("take turns"))));
  EXPECT_THAT(DescribeBinding(std::vector<RankCpus>(2, {0, {5}}), 0, 64),
              AllOf(HasSubstr("take turns"), HasSubstr("--bind-to none")));
}

TEST(DescribeBinding, EachNodeIsItsOwn) {
  const std::vector<RankCpus> ranks = {{0, {0, 1}}, {1, {0}}, {1, {0}}};
  EXPECT_EQ(DescribeBinding(ranks, 0, 2), "");
  EXPECT_THAT(DescribeBinding(ranks, 1, 1), HasSubstr("2 rank(s)"));
}

}  // namespace
}  // namespace heddle
