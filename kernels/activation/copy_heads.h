// out[t, h] = x[t, h]: packs rows head by head, and back.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/stream.h"

namespace heddle {

struct CopyHeadsArgs {
  ConstHeadsView x;  // [tokens, heads, dim]
  HeadsView out;     // [tokens, heads, dim]; does not overlap x
};

absl::Status ValidateCopyHeads(const CopyHeadsArgs& args);
using CopyHeadsFn = absl::Status (*)(const CopyHeadsArgs& args, Stream& stream);

}  // namespace heddle
