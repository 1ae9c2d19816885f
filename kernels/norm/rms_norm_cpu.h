#pragma once

#include "kernels/norm/rms_norm.h"

namespace heddle {

absl::Status RmsNormCpu(const RmsNormArgs& args, Stream& stream);

}  // namespace heddle
