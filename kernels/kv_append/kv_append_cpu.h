#pragma once

#include "kernels/kv_append/kv_append.h"
#include "kernels/kv_append/latent_append.h"
#include "kernels/kv_append/latent_gather.h"

namespace heddle {

absl::Status KvAppendCpu(const KvAppendArgs& args, Stream& stream);
absl::Status KvCopyPagesCpu(const KvCopyPagesArgs& args, Stream& stream);
absl::Status LatentAppendCpu(const LatentAppendArgs& args, Stream& stream);
absl::Status LatentGatherCpu(const LatentGatherArgs& args, Stream& stream);

}  // namespace heddle
