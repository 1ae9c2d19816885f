#pragma once

#include "kernels/kv_append/kv_append.h"

namespace heddle {

absl::Status KvAppendCpu(const KvAppendArgs& args, Stream& stream);
absl::Status KvCopyPagesCpu(const KvCopyPagesArgs& args, Stream& stream);

}  // namespace heddle
