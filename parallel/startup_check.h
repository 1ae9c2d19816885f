// Whether tensors really travel between the ranks, before anything long is begun.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "parallel/world.h"

namespace heddle {

// Collective, and over in milliseconds: every rank sums arrays of several sizes, from one float to
// more than what ranks share, with all others and compares every element. A broken link shows here
// and not after minutes of reading weights.
//
// DataLoss for a wrong sum, with the first wrong element; an error of this rank alone. If the sums
// have not come within the deadline, the job is aborted with DeadlineExceeded. Both name the size.
absl::Status CheckAllReduce(World& world, Backend& backend, Stream& stream,
                            double deadline_seconds = 60);

}  // namespace heddle
