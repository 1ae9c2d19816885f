// Every collective between rank threads, on one pretended node and on several.
#include <string>
#include <thread>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "parallel/thread_world.h"
#include "tests/parallel/collective_checks.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<ThreadWorld> MakeWorld(int size, int ranks_per_node) {
  auto world = ThreadWorld::Create({.size = size, .ranks_per_node = ranks_per_node});
  EXPECT_TRUE(world.ok()) << world.status();
  return *std::move(world);
}

void RunAll(int size, int ranks_per_node, const std::function<absl::Status(World&)>& body) {
  for (const absl::Status& status : MakeWorld(size, ranks_per_node)->Run(body)) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

// (ranks, ranks a node; 0: all on one)
class ThreadWorldTest : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  int ranks_per_node() const { return std::get<1>(GetParam()); }
};

TEST_P(ThreadWorldTest, CollectivesMatchTheReferenceBitForBit) {
  RunAll(size(), ranks_per_node(), [](World& world) {
    for (const int64_t count : kMessageSizes) {
      RETURN_IF_ERROR(CheckCollectives(*world.communicator, count, CpuStreamMode::kImmediate));
    }
    return absl::OkStatus();
  });
}

TEST_P(ThreadWorldTest, DeferredStreamsGiveTheSame) {
  RunAll(size(), ranks_per_node(), [](World& world) {
    for (const int64_t count : {1, 7, 4096, 9'000}) {
      RETURN_IF_ERROR(CheckCollectives(*world.communicator, count, CpuStreamMode::kDeferred));
    }
    return absl::OkStatus();
  });
}

TEST_P(ThreadWorldTest, SplitGroupsWork) {
  RunAll(size(), ranks_per_node(), [](World& world) { return CheckSplits(world, 10'000); });
}

TEST_P(ThreadWorldTest, ControlChannelCarriesMessages) {
  RunAll(size(), ranks_per_node(), CheckControlChannel);
}

TEST_P(ThreadWorldTest, PlansTravelWhileTensorsAreReduced) {
  // As on rank 0 of the engine: one thread plans ahead, the other computes.
  RunAll(size(), ranks_per_node(), [](World& world) -> absl::Status {
    absl::Status planned;
    std::thread planner([&] {
      for (int i = 0; i < 200 && planned.ok(); ++i) {
        std::string plan = world.self.rank == 0 ? std::to_string(i) : "";
        planned = world.control->Broadcast(plan);
        if (plan != std::to_string(i)) planned.Update(absl::InternalError("wrong plan"));
      }
    });
    absl::Status reduced;
    for (int i = 0; i < 8 && reduced.ok(); ++i) {
      reduced = CheckCollectives(*world.communicator, 300, CpuStreamMode::kImmediate);
      world.control->ReportProgress();
    }
    planner.join();
    RETURN_IF_ERROR(planned);
    return reduced;
  });
}

TEST_P(ThreadWorldTest, RanksKnowTheirPlace) {
  const int per_node = ranks_per_node() > 0 ? ranks_per_node() : size();
  RunAll(size(), ranks_per_node(), [&](World& world) {
    const RankInfo& self = world.self;
    EXPECT_EQ(self.size, size());
    EXPECT_EQ(self.node_index, self.rank / per_node);
    EXPECT_EQ(self.node_rank, self.rank % per_node);
    EXPECT_EQ(self.num_nodes, (size() + per_node - 1) / per_node);
    EXPECT_EQ(self.node_size, std::min(per_node, size() - self.node_index * per_node));
    EXPECT_EQ(world.communicator->rank(), self.rank);
    EXPECT_EQ(world.communicator->size(), size());
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(OneNode, ThreadWorldTest,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Values(0)));
INSTANTIATE_TEST_SUITE_P(SeveralNodes, ThreadWorldTest,
                         testing::Values(std::tuple(2, 1), std::tuple(3, 1), std::tuple(3, 2),
                                         std::tuple(5, 2), std::tuple(8, 3), std::tuple(8, 4)));

TEST(ThreadWorldTest, ArgumentsAreChecked) {
  RunAll(2, 0, [](World& world) -> absl::Status {
    Communicator& all = *world.communicator;
    const auto backend = CreateCpuBackend({});
    ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
    float data[4] = {};
    const int64_t counts[] = {1, 1, 1};
    EXPECT_EQ(all.AllReduce(data, 1, DType::kBFloat16, ReduceOp::kSum, *stream).code(),
              absl::StatusCode::kUnimplemented);
    EXPECT_FALSE(all.AllReduce(data, -1, DType::kFloat32, ReduceOp::kSum, *stream).ok());
    EXPECT_THAT(std::string(all.AllGatherV(data, data, counts, *stream).message()),
                HasSubstr("3 counts were given for 2 ranks"));
    EXPECT_FALSE(all.ReduceScatterV(data, data, counts, DType::kFloat32, *stream).ok());
    EXPECT_FALSE(all.Broadcast(data, 4, 2, *stream).ok());
    EXPECT_FALSE(all.Send(data, 4, all.rank(), *stream).ok());
    EXPECT_FALSE(all.Recv(data, 4, -1, *stream).ok());
    return stream->Synchronize();
  });
}

TEST(ThreadWorldTest, TooManyGroupsAreRefusedOnAllRanks) {
  RunAll(3, 2, [](World& world) -> absl::Status {
    std::vector<std::unique_ptr<Communicator>> groups;
    for (int i = 0; i < 1000; ++i) {
      auto group = world.communicator->Split(0, 0);
      if (!group.ok()) {
        EXPECT_EQ(group.status().code(), absl::StatusCode::kResourceExhausted) << group.status();
        EXPECT_GE(i, 8);
        // The rest goes on.
        return CheckCollectives(*world.communicator, 100, CpuStreamMode::kImmediate);
      }
      groups.push_back(*std::move(group));
    }
    return absl::InternalError("a thousand groups fit");
  });
}

TEST(ThreadWorldTest, OptionsAreChecked) {
  EXPECT_FALSE(ThreadWorld::Create({.size = 0}).ok());
  EXPECT_FALSE(ThreadWorld::Create({.size = 2, .ranks_per_node = -1}).ok());
  EXPECT_FALSE(ThreadWorld::Create({.size = 2, .progress_timeout_seconds = 0}).ok());
}

}  // namespace
}  // namespace heddle
