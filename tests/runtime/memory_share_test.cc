#include "runtime/memory_share.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "parallel/thread_world.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kGiB = 1 << 30;

// Where /proc and /sys of a machine that never was lie.
class FreeMemoryTest : public testing::Test {
 protected:
  FreeMemoryTest() {
    std::filesystem::remove_all(root_);
    Write("/proc/meminfo", "MemTotal: 32000 kB\nMemFree: 1 kB\nMemAvailable:   20480 kB\n");
  }
  ~FreeMemoryTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& contents) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << contents;
  }

  const std::string root_ = testing::TempDir() + "heddle_free_memory";
};

TEST_F(FreeMemoryTest, IsWhatTheNodeHasAvailable) {
  EXPECT_EQ(FreeMemory(root_), 20 * kMiB);
  Write("/proc/self/cgroup", "0::/\n");
  EXPECT_EQ(FreeMemory(root_), 20 * kMiB);
  EXPECT_GT(FreeMemory(), 0);  // of this machine
}

TEST_F(FreeMemoryTest, IsLessInAControlGroupThatHasLess) {
  Write("/proc/self/cgroup", "0::/job/step\n");
  const std::string group = "/sys/fs/cgroup/job/step/";
  Write(group + "memory.max", "max\n");
  Write(group + "memory.current", absl::StrCat(3 * kMiB, "\n"));
  EXPECT_EQ(FreeMemory(root_), 20 * kMiB);
  Write(group + "memory.max", absl::StrCat(8 * kMiB, "\n"));
  EXPECT_EQ(FreeMemory(root_), 5 * kMiB);
  // Pages of files would go first.
  Write(group + "memory.stat", absl::StrCat("anon 5\ninactive_file ", 2 * kMiB, "\nslab 9\n"));
  EXPECT_EQ(FreeMemory(root_), 7 * kMiB);
  // A group above may have less.
  Write("/sys/fs/cgroup/job/memory.max", absl::StrCat(6 * kMiB, "\n"));
  Write("/sys/fs/cgroup/job/memory.current", absl::StrCat(6 * kMiB + 1, "\n"));
  EXPECT_EQ(FreeMemory(root_), 0);
}

TEST_F(FreeMemoryTest, KnowsTheFirstVersionOfControlGroups) {
  Write("/proc/self/cgroup", "9:cpu,cpuacct:/a\n4:memory:/b\n0::/c\n");
  Write("/sys/fs/cgroup/memory/b/memory.limit_in_bytes", absl::StrCat(9 * kMiB, "\n"));
  Write("/sys/fs/cgroup/memory/b/memory.usage_in_bytes", absl::StrCat(kMiB, "\n"));
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n");
  EXPECT_EQ(FreeMemory(root_), 8 * kMiB);
}

// A sequence of the greatest length takes 1 GiB, all of them 64.
CacheNeed Need(int64_t free_memory) {
  return {.bytes_per_page = kMiB,
          .longest_sequence = 1024,
          .whole_batch = 64 * 1024,
          .free_memory = free_memory};
}

int64_t Pages(const CacheBudget& budget, const CacheNeed& need) {
  const absl::StatusOr<int64_t> pages = ChooseNumPages(budget, need);
  EXPECT_TRUE(pages.ok()) << pages.status();
  return pages.value_or(-1);
}

std::string Refusal(const CacheBudget& budget, const CacheNeed& need) {
  const absl::StatusOr<int64_t> pages = ChooseNumPages(budget, need);
  EXPECT_EQ(pages.status().code(), absl::StatusCode::kResourceExhausted);
  return std::string(pages.status().message());
}

TEST(ChooseNumPages, UnaskedItTakesFourGibibytesWhereThatIsEnough) {
  EXPECT_EQ(Pages({}, Need(100 * kGiB)), 4 * 1024);
  EXPECT_EQ(Pages({}, Need(5 * kGiB)), 4 * 1024);
  EXPECT_EQ(Pages({}, Need(2 * kGiB)), 1843);  // nine tenths
  CacheNeed need = Need(100 * kGiB);
  need.whole_batch = 2000;
  EXPECT_EQ(Pages({}, need), 2000) << "no use for more";
  need = Need(100 * kGiB);
  need.longest_sequence = 20 * 1024;
  EXPECT_EQ(Pages({}, need), 20 * 1024) << "one sequence of the greatest length";
  need.free_memory = 10 * kGiB;
  EXPECT_EQ(Pages({}, need), 9 * 1024);
}

TEST(ChooseNumPages, FlagsDecide) {
  EXPECT_EQ(Pages({.num_pages = 7}, Need(kGiB)), 7);
  EXPECT_EQ(Pages({.memory_bytes = 10 * kGiB + 5}, Need(100 * kGiB)), 10 * 1024);
  EXPECT_EQ(Pages({.utilization = 0.5}, Need(100 * kGiB)), 50 * 1024);
  EXPECT_EQ(Pages({.utilization = 1.0}, Need(100 * kGiB)), 64 * 1024) << "no use for more";
  EXPECT_EQ(Pages({.memory_bytes = 900 * kGiB}, Need(100 * kGiB)), 64 * 1024);
}

TEST(ChooseNumPages, WhatCannotBeIsRefusedWithTheFigures) {
  EXPECT_THAT(Refusal({.memory_bytes = kMiB - 1}, Need(kGiB)),
              HasSubstr("--kv-cache-memory-bytes 1048575: a page takes 1048576 bytes"));
  EXPECT_THAT(
      Refusal({.memory_bytes = 2 * kGiB}, Need(kGiB)),
      AllOf(HasSubstr("--kv-cache-memory-bytes 2147483648"), HasSubstr("has 1073741824 bytes")));
  EXPECT_THAT(Refusal({.num_pages = 1025}, Need(kGiB)), HasSubstr("--num-kv-pages 1025"));
  EXPECT_THAT(Refusal({.utilization = 1e-6}, Need(kGiB)), HasSubstr("--gpu-memory-utilization"));
  EXPECT_THAT(Refusal({}, Need(kMiB)), HasSubstr("no memory for the cache"));
  EXPECT_THAT(Refusal({}, Need(0)), HasSubstr("has 0 bytes free"));
}

TEST(ChooseNumPages, ARankThatStoresNothingLeavesItToTheOthers) {
  CacheNeed need = Need(0);
  need.bytes_per_page = 0;
  EXPECT_EQ(Pages({}, need), 64 * 1024);
  EXPECT_EQ(Pages({.memory_bytes = 1}, need), 64 * 1024);
  EXPECT_EQ(Pages({.num_pages = 3}, need), 3);
}

TEST(DescribeUnequalMemory, NamesTheSmallestAndTheLargest) {
  EXPECT_EQ(DescribeUnequalMemory({}), "");
  EXPECT_EQ(DescribeUnequalMemory({{"a", 10 * kGiB}}), "");
  EXPECT_EQ(DescribeUnequalMemory({{"a", 10 * kGiB}, {"b", 5 * kGiB}}), "");
  EXPECT_THAT(
      DescribeUnequalMemory({{"a", 10 * kGiB}, {"b", 12 * kGiB}, {"c", 4 * kGiB}}),
      AllOf(HasSubstr("rank 2 (c) may take 4.00 GiB"), HasSubstr("rank 1 (b) may take 12.00 GiB")));
}

TEST(WarnOfUnequalMemory, RankZeroAloneSaysSo) {
  for (const int64_t bytes_of_rank_1 : {kGiB, 7 * kGiB}) {
    testing::internal::CaptureStderr();
    const auto world = ThreadWorld::Create({.size = 3});
    for (const absl::Status& status : (*world)->Run([&](World& self) {
           const int64_t bytes = self.self.rank == 1 ? bytes_of_rank_1 : 8 * kGiB;
           return WarnOfUnequalMemory(bytes, self);
         })) {
      EXPECT_TRUE(status.ok()) << status;
    }
    const std::string said = testing::internal::GetCapturedStderr();
    const size_t first = said.find("unequal memory");
    EXPECT_EQ(first != std::string::npos, bytes_of_rank_1 == kGiB) << said;
    if (first != std::string::npos) {
      EXPECT_EQ(said.find("unequal memory", first + 1), std::string::npos) << said;
      EXPECT_THAT(said, HasSubstr("rank 1"));
    }
  }
}

}  // namespace
}  // namespace heddle
