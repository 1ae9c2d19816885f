#pragma once

#include "kernels/rope/rope.h"

namespace heddle {

absl::Status RopeCpu(const RopeArgs& args, Stream& stream);

}  // namespace heddle
