// Attention on the CPU.
#pragma once

#include "kernels/attention/gqa_attention.h"

namespace heddle {

absl::Status GqaAttentionCpu(const GqaAttentionArgs& args, Stream& stream);
absl::Status DenseAttentionCpu(const DenseAttentionArgs& args, Stream& stream);

}  // namespace heddle
