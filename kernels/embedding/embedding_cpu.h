// The CPU's embedding look-up.
#pragma once

#include "kernels/embedding/embedding.h"

namespace heddle {

// See EmbeddingFn; the stream must be a CpuStream.
absl::Status EmbeddingCpu(const EmbeddingArgs& args, Stream& stream);

}  // namespace heddle
