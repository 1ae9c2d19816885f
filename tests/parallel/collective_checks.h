// What every communicator must do, checked from inside one rank: in a ThreadWorld and under mpirun.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/world.h"

namespace heddle {

// Each returns an error that names the first element that is wrong. All ranks call them alike.
// Results are compared bit for bit with a naive reference that adds in rank order.

// Every collective with messages around `count` floats.
absl::Status CheckCollectives(Communicator& communicator, int64_t count, CpuStreamMode mode);

// Groups split off by color and key, and along the axes of a grid.
absl::Status CheckSplits(World& world, int64_t count);

// Broadcast, Gather, AllReduceMin and Barrier.
absl::Status CheckControlChannel(World& world);

// The sizes of messages that take different paths.
inline constexpr int64_t kMessageSizes[] = {0, 1, 7, 4096, 300'000};

}  // namespace heddle
