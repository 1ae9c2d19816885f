#include "kernels/cpu/thread_pool.h"

#include <chrono>
#include <ctime>
#include <numeric>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace heddle {
namespace {

class ThreadPool : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  CpuThreadPool pool_{std::get<0>(GetParam()), std::get<1>(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(ThreadsAndOversubscription, ThreadPool,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Bool()));

TEST_P(ThreadPool, EveryThreadRunsOnceAndItsWritesAreSeen) {
  std::vector<int> runs(pool_.num_threads());  // Plain ints: TSan checks the hand-over.
  for (int round = 1; round <= 200; ++round) {
    pool_.ParallelRun([&](int thread) { ++runs[thread]; });
    for (int count : runs) ASSERT_EQ(count, round);
  }
}

TEST_P(ThreadPool, ThreadZeroIsTheCaller) {
  std::vector<std::thread::id> ids(pool_.num_threads());
  pool_.ParallelRun([&](int thread) { ids[thread] = std::this_thread::get_id(); });
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  for (size_t i = 0; i < ids.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(ids[i], ids[j]);
  }
}

TEST_P(ThreadPool, EveryTaskRunsOnce) {
  for (int64_t num_tasks : {0, 1, 2, 3, 100, 1001}) {
    std::vector<int> runs(num_tasks);
    pool_.ParallelFor(num_tasks, [&](int64_t task) { ++runs[task]; });
    EXPECT_EQ(std::accumulate(runs.begin(), runs.end(), int64_t{0}), num_tasks);
    for (int count : runs) EXPECT_EQ(count, 1);
  }
}

TEST_P(ThreadPool, WorksAfterItsThreadsFellAsleep) {
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    int64_t sum = 0;
    std::vector<int64_t> parts(pool_.num_threads());
    pool_.ParallelRun([&](int thread) { parts[thread] = thread + 1; });
    for (int64_t part : parts) sum += part;
    EXPECT_EQ(sum, int64_t{pool_.num_threads()} * (pool_.num_threads() + 1) / 2);
  }
}

TEST_P(ThreadPool, TheCallerWaitsForASlowThread) {
  std::vector<int> done(pool_.num_threads());
  pool_.ParallelRun([&](int thread) {
    if (thread == pool_.num_threads() - 1)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    done[thread] = 1;
  });
  for (int flag : done) EXPECT_EQ(flag, 1);
}

TEST(ThreadPoolIdle, SleepingThreadsUseNoProcessorTime) {
  CpuThreadPool pool(4);
  pool.ParallelRun([](int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // Past the spinning.
  const std::clock_t before = std::clock();                    // Of all threads of the process.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const double used_ms = 1e3 * static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EXPECT_LT(used_ms, 20) << "three spinning threads would use 600 ms";
}

TEST(ThreadPoolScratch, IsAlignedWritableAndGrows) {
  CpuThreadPool pool(2);
  for (size_t bytes : {size_t{1}, size_t{1000}, size_t{10}, size_t{1} << 20}) {
    std::byte* scratch = pool.Scratch(bytes);
    ASSERT_NE(scratch, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(scratch) % 128, 0u);
    std::fill_n(scratch, bytes, std::byte{1});
  }
}

TEST(AllowedCpus, IsPositive) { EXPECT_GE(NumAllowedCpus(), 1); }

}  // namespace
}  // namespace heddle
