// Attention on the CPU.
#pragma once

#include "kernels/attention/gqa_attention.h"
#include "kernels/attention/merge_partials.h"
#include "kernels/attention/mla_decode.h"
#include "kernels/attention/mla_prefill.h"

namespace heddle {

absl::Status GqaAttentionCpu(const GqaAttentionArgs& args, Stream& stream);
absl::Status DenseAttentionCpu(const DenseAttentionArgs& args, Stream& stream);
absl::Status MlaDecodeCpu(const MlaDecodeArgs& args, Stream& stream);
absl::Status MlaPrefillCpu(const MlaPrefillArgs& args, Stream& stream);
absl::Status MergePartialsCpu(const MergePartialsArgs& args, Stream& stream);

}  // namespace heddle
