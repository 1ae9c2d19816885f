// All-reduce of this project beside MPI_Allreduce: mpirun -n 2 comm_bench [ranks per pretended
// host] Prints medians of interleaved runs, in microseconds, and their ratio.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "kernels/base/logging.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/world_mpi.h"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 21;

double MedianMicroseconds(int iterations, const std::function<void()>& call) {
  std::vector<double> times;
  for (int i = 0; i < iterations; ++i) {
    const auto start = Clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void Run(int ranks_per_node) {
  absl::StatusOr<World> world = JoinMpiWorld({.ranks_per_node = ranks_per_node});
  CHECK(world.ok()) << world.status();
  const auto backend = CreateCpuBackend({});
  const auto stream = backend->CreateStream();
  CHECK(stream.ok());
  if (world->self.rank == 0) {
    std::printf("%d ranks on %d nodes\n%10s %12s %12s %8s\n", world->self.size,
                world->self.num_nodes, "bytes", "heddle us", "MPI us", "ratio");
  }
  for (int64_t bytes = 8; bytes <= 4 << 20; bytes *= 4) {
    const int64_t count = bytes / static_cast<int64_t>(sizeof(float));
    std::vector<float> data(count, 0.0f), target(count);
    const int iterations = static_cast<int>(std::clamp<int64_t>((4 << 20) / bytes, 5, 500));
    const auto ours = [&] {
      CHECK_OK(world->communicator->AllReduce(data.data(), count, DType::kFloat32, ReduceOp::kSum,
                                              **stream));
      CHECK_OK((*stream)->Synchronize());
    };
    const auto theirs = [&] {
      MPI_Allreduce(data.data(), target.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    };
    std::vector<double> our_times, their_times, ratios;
    for (int round = 0; round < kRounds; ++round) {
      our_times.push_back(MedianMicroseconds(iterations, ours));
      their_times.push_back(MedianMicroseconds(iterations, theirs));
      ratios.push_back(our_times.back() / their_times.back());
    }
    if (world->self.rank == 0) {
      std::printf("%10ld %12.2f %12.2f %8.2f\n", static_cast<long>(bytes), Median(our_times),
                  Median(their_times), Median(ratios));
    }
  }
  CHECK_OK(world->control->Barrier());
}

}  // namespace
}  // namespace heddle

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  heddle::Run(argc > 1 ? std::atoi(argv[1]) : 0);
  MPI_Finalize();
  return 0;
}
