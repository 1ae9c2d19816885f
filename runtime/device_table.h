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
  double fp8_flops = 0;          // 0: float8 is widened first
  int64_t activation_bytes = 2;  // of an element that ranks exchange
  CollectiveSpeed all_reduce = {};
  CollectiveSpeed all_gather = {};
  CollectiveSpeed reduce_scatter = {};
  CollectiveSpeed all_to_all = {};
  std::string source;
};

// The built-in GPUs, and "cpu" last.
std::vector<std::string> DeviceNames();

// Upper and lower case are the same. "cpu" is this machine as measured now, in about 0.2 s, one of
// `num_ranks` ranks that share it evenly. InvalidArgument names the devices there are.
absl::StatusOr<DeviceFigures> FindDevice(absl::string_view name, int num_ranks);

}  // namespace heddle
