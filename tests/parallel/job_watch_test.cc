#include "parallel/job_watch.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kTimeout = 60;
constexpr double kTick = 0.1;

// Three ranks here and one other node, all healthy unless a test says otherwise.
class JobWatchTest : public testing::Test {
 protected:
  JobWatchTest()
      : watch_(kTimeout, /*sees_all_nodes=*/true, {"rank 0 (a)", "rank 1 (a)", "rank 2 (a)"},
               {"the node b of rank 3"}),
        ranks_(3),
        nodes_(1) {}

  // Looks for `seconds`, while every rank lives; `each_tick` changes the signs before each look.
  template <typename EachTick>
  absl::Status Watch(double seconds, EachTick each_tick) {
    for (double t = 0; t < seconds; t += kTick) {
      for (RankSigns& rank : ranks_) ++rank.heartbeat;
      for (NodeSigns& node : nodes_) ++node.num_messages;
      each_tick();
      const absl::Status status = watch_.Observe(kTick, ranks_, nodes_);
      if (!status.ok()) {
        ended_after_ = t;
        return status;
      }
    }
    return absl::OkStatus();
  }
  absl::Status Watch(double seconds) {
    return Watch(seconds, [] {});
  }

  void AllIdle() {
    for (RankSigns& rank : ranks_) rank.idle = true;
  }

  JobWatch watch_;
  std::vector<RankSigns> ranks_;
  std::vector<NodeSigns> nodes_;
  double ended_after_ = 0;
};

TEST_F(JobWatchTest, AnIdleHourIsFine) {
  AllIdle();
  EXPECT_TRUE(Watch(3600).ok());
}

TEST_F(JobWatchTest, ALongComputationThatReportsIsFine) {
  // Rank 1 takes an hour, a layer every half minute; the others wait for it.
  ranks_[0].waiting = ranks_[2].waiting = true;
  nodes_[0].waiting = true;
  double since_report = 0;
  EXPECT_TRUE(Watch(3600, [&] {
                since_report += kTick;
                if (since_report < 30) return;
                since_report = 0;
                ++ranks_[1].progress;
              }).ok());
}

TEST_F(JobWatchTest, ProgressOnAnotherNodeCounts) {
  for (RankSigns& rank : ranks_) rank.waiting = true;
  EXPECT_TRUE(Watch(3600, [&] { ++nodes_[0].progress; }).ok());
}

TEST_F(JobWatchTest, ABusyRankWithoutProgressIsNamedAndNotThoseThatWaitForIt) {
  ranks_[0].waiting = ranks_[2].waiting = true;
  ranks_[0].wait_peer = ranks_[2].wait_peer = 1;
  const absl::Status status = Watch(3600);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1 (a) has made no progress"), Not(HasSubstr("rank 0"))));
  EXPECT_NEAR(ended_after_, kTimeout, 1);
}

TEST_F(JobWatchTest, ABusyRankAmongIdleOnesIsNamed) {
  AllIdle();
  ranks_[2].idle = false;
  EXPECT_THAT(std::string(Watch(3600).message()), HasSubstr("rank 2 (a) has made no progress"));
}

TEST_F(JobWatchTest, AStoppedProcessIsNoticedEvenWhileAllAreIdle) {
  AllIdle();
  EXPECT_TRUE(Watch(1000).ok());
  const absl::Status status = Watch(3600, [&] { --ranks_[2].heartbeat; });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 2 (a) has shown no sign of life"), HasSubstr("stopped")));
  EXPECT_NEAR(ended_after_, kTimeout, 1);
}

TEST_F(JobWatchTest, AShortStopIsForgiven) {
  AllIdle();
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(Watch(kTimeout * 0.9, [&] { --ranks_[2].heartbeat; }).ok());
    EXPECT_TRUE(Watch(1).ok());
  }
}

TEST_F(JobWatchTest, ADeadProcessIsNoticedAtOnce) {
  AllIdle();
  EXPECT_TRUE(Watch(10).ok());
  ranks_[1].dead = true;
  const absl::Status status = Watch(10);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 (a) has died"));
  EXPECT_EQ(ended_after_, 0);
}

TEST_F(JobWatchTest, RanksThatFinishMayGo) {
  ranks_[0].left = ranks_[0].dead = true;
  // The others still write their results, without a report, but within the time.
  EXPECT_TRUE(Watch(kTimeout * 0.9).ok());
  ranks_[1].left = ranks_[2].left = true;
  nodes_[0].left_rank = 3;
  nodes_[0].all_left = true;
  EXPECT_TRUE(Watch(3600, [&] {
                for (RankSigns& rank : ranks_) --rank.heartbeat;
                --nodes_[0].num_messages;
              }).ok());
}

TEST_F(JobWatchTest, ARankThatLeavesWhileAnotherWaitsEndsTheJob) {
  ranks_[1].left = true;
  ranks_[0].waiting = true;
  ranks_[0].wait_op = WaitOp::kAllReduce;
  ranks_[0].wait_peer = 1;
  const absl::Status status = Watch(10);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1 (a) has left the job"),
                    HasSubstr("rank 0 (a) waits in AllReduce for rank 1")));
  EXPECT_LT(ended_after_, 4);
}

TEST_F(JobWatchTest, ALongWaitIsNotHeldAgainstARankThatLeavesAtItsEnd) {
  for (RankSigns& rank : ranks_) rank.waiting = true;
  nodes_[0].waiting = true;
  EXPECT_TRUE(Watch(kTimeout * 0.9).ok());
  // The last collective is over: rank 0 goes at once, the others wake a moment later.
  ranks_[0].left = true;
  EXPECT_TRUE(Watch(0.5).ok());
  for (RankSigns& rank : ranks_) ++rank.progress;
  for (RankSigns& rank : ranks_) rank.waiting = false;
  EXPECT_TRUE(Watch(10).ok());
}

TEST_F(JobWatchTest, ARankOfAnotherNodeThatLeavesEndsTheJobToo) {
  nodes_[0].left_rank = 4;
  AllIdle();
  EXPECT_THAT(std::string(Watch(10).message()), HasSubstr("rank 4 has left the job"));
  EXPECT_LT(ended_after_, 4);
}

TEST_F(JobWatchTest, WaitsThatDoNotMatchAreDescribed) {
  ranks_[0].waiting = ranks_[1].waiting = true;
  ranks_[0].wait_op = WaitOp::kAllReduce;
  ranks_[0].wait_peer = 1;
  ranks_[1].wait_op = WaitOp::kBarrier;
  ranks_[2].idle = true;
  nodes_[0].waiting = true;
  const absl::Status status = Watch(3600);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 0 (a) waits in AllReduce for rank 1"),
                    HasSubstr("rank 1 (a) waits in Barrier"), HasSubstr("rank 2 (a) is idle"),
                    HasSubstr("the node b of rank 3 waits")));
  EXPECT_NEAR(ended_after_, kTimeout + 1.5, 1);
}

TEST_F(JobWatchTest, OnlyAWatchThatSeesAllNodesJudgesTheJob) {
  JobWatch local(kTimeout, /*sees_all_nodes=*/false, {"rank 1 (a)"}, {});
  RankSigns rank;
  rank.waiting = true;
  for (double t = 0; t < 3600; t += kTick) {
    ++rank.heartbeat;
    ASSERT_TRUE(local.Observe(kTick, {&rank, 1}, {}).ok());
  }
}

TEST_F(JobWatchTest, ANodeThatFallsSilentIsNamed) {
  AllIdle();
  const absl::Status status = Watch(3600, [&] { --nodes_[0].num_messages; });
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the node b of rank 3 has not been heard of"));
  EXPECT_NEAR(ended_after_, kTimeout + 1.5, 1);
}

}  // namespace
}  // namespace heddle
