// The mixture-of-experts ops of the CPU.
#pragma once

#include "kernels/moe/router.h"

namespace heddle {

// See RouterFn; streams must be CpuStreams.
absl::Status RouterCpu(const RouterArgs& args, Stream& stream);

}  // namespace heddle
