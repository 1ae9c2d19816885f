// How fast the threads of a rank compute and read, at this very moment: for benches to compare a
// kernel with, and for the cost model.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/cpu/thread_pool.h"

namespace heddle {

// Operations a second of the first `num_threads` threads of the pool, of float32 multiply-adds of
// the widest vectors there are; a multiply-add is two operations. Takes about 5 ms.
double MultiplyAddRate(CpuThreadPool& pool, int num_threads);

// Bytes a second at which all threads together read `memory` once; fastest in whole MiB. Give it
// several times the last cache, on pages of its own.
double ReadRate(CpuThreadPool& pool, std::span<const std::byte> memory);

struct MachineSpeed {
  double flops = 0;
  double read_bytes_per_second = 0;
};

// The best of what all threads reach within about 0.2 s, which also wakes CPUs that slept.
MachineSpeed MeasureMachine(CpuThreadPool& pool);

}  // namespace heddle
