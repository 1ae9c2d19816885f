// The mixture-of-experts ops of the CPU.
#pragma once

#include "kernels/moe/expert_combine.h"
#include "kernels/moe/expert_dispatch.h"
#include "kernels/moe/router.h"

namespace heddle {

absl::Status ExpertCombineCpu(const ExpertCombineArgs& args, Stream& stream);
absl::Status ExpertDispatchCpu(const ExpertDispatchArgs& args, Stream& stream);
absl::Status RouterCpu(const RouterArgs& args, Stream& stream);

}  // namespace heddle
