// The element-wise ops of the CPU.
#pragma once

#include "kernels/activation/add.h"
#include "kernels/activation/copy_heads.h"
#include "kernels/activation/gather_rows.h"
#include "kernels/activation/silu_mul.h"

namespace heddle {

absl::Status AddCpu(const AddArgs& args, Stream& stream);
absl::Status CopyHeadsCpu(const CopyHeadsArgs& args, Stream& stream);
absl::Status GatherRowsCpu(const GatherRowsArgs& args, Stream& stream);
absl::Status SiluMulCpu(const SiluMulArgs& args, Stream& stream);

}  // namespace heddle
