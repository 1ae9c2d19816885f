// The constants of the cost model: what a device can do, and where that is written.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "parallel/link_speed.h"

namespace heddle {

// Of one rank's device. Plain numbers: whoever has measured better ones puts those in.
struct DeviceFigures {
  std::string name;
  double memory_bytes = 0;
  double read_bytes_per_second = 0;
  // Dense, a multiply-add being two operations: of bfloat16 with float32 sums, on a CPU of float32.
  double flops = 0;
  double fp8_flops = 0;  // 0: float8 is widened first
  // How near kernels come: the share of `flops` that they reach, and whether they read and compute
  // at the same time or one after the other.
  double attained_flops_share = 1;
  bool overlaps_reads = true;
  int64_t activation_bytes = 2;  // of an element that ranks exchange
  CollectiveSpeed all_reduce = {};
  CollectiveSpeed all_gather = {};
  CollectiveSpeed reduce_scatter = {};
  CollectiveSpeed all_to_all = {};
  std::string source;
};

// A CPU of so many operations and bytes a second, with a node's shared memory between ranks; its
// memory and source are left out.
DeviceFigures CpuFigures(double flops, double read_bytes_per_second);

// The built-in GPUs, and "cpu" last.
std::vector<std::string> DeviceNames();

// Upper and lower case are the same. "cpu" is this machine as measured now, in about 0.2 s, one of
// `num_ranks` ranks that share it evenly. InvalidArgument names the devices there are.
absl::StatusOr<DeviceFigures> FindDevice(absl::string_view name, int num_ranks);

}  // namespace heddle
