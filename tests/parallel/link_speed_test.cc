#include "parallel/link_speed.h"

#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/thread_world.h"

namespace heddle {
namespace {

using ::testing::Each;

// (ranks, ranks a node; 0: all on one, stream)
class LinkSpeedTest : public testing::TestWithParam<std::tuple<int, int, CpuStreamMode>> {};

TEST_P(LinkSpeedTest, IsPositiveAndTheSameOnAllRanks) {
  const auto [size, ranks_per_node, mode] = GetParam();
  // By size of the group; 0: an all-reduce.
  std::vector<std::map<int, std::pair<double, double>>> speeds(size);
  const auto world = ThreadWorld::Create({.size = size, .ranks_per_node = ranks_per_node});
  ASSERT_TRUE(world.ok()) << world.status();
  const auto measure = [&, size = size, mode = mode](World& self) -> absl::Status {
    const auto backend = CreateCpuBackend({.num_threads = 1, .stream_mode = mode});
    ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
    for (int group = 0; group <= size; ++group) {
      if (group == 1 || (group > 1 && size % group != 0)) continue;
      ASSIGN_OR_RETURN(const CollectiveSpeed speed,
                       group == 0 ? MeasureAllReduce(self, *backend, *stream)
                                  : MeasureExchange(self, group, *backend, *stream));
      speeds[self.self.rank][group] = {speed.latency_seconds, speed.bytes_per_second};
    }
    return absl::OkStatus();
  };
  for (const absl::Status& status : (*world)->Run(measure)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(speeds, Each(speeds[0]));
  for (const auto& [group, speed] : speeds[0]) {
    EXPECT_GT(speed.first, 0) << group;
    EXPECT_GT(speed.second, 0) << group;
    EXPECT_TRUE(std::isfinite(speed.second)) << group;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, LinkSpeedTest,
                         testing::Values(std::tuple(2, 0, CpuStreamMode::kImmediate),
                                         std::tuple(2, 1, CpuStreamMode::kImmediate),
                                         std::tuple(3, 0, CpuStreamMode::kDeferred),
                                         std::tuple(6, 2, CpuStreamMode::kImmediate)));

TEST(LinkSpeed, APeerThatDiesEndsIt) {
  const auto world = ThreadWorld::Create({.size = 3});
  const auto statuses = (*world)->Run([](World& self) -> absl::Status {
    if (self.self.rank == 2) return absl::DataLossError("rank 2 is gone");
    const auto backend = CreateCpuBackend({.num_threads = 1});
    ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
    return MeasureAllReduce(self, *backend, *stream).status();
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("rank 2 is gone"));
  }
}

}  // namespace
}  // namespace heddle
