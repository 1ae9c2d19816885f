// An ordered queue of work on one device.
#pragma once

#include "absl/status/status.h"

namespace heddle {

// Owned by one rank and used by its worker thread only. Ops and collectives are enqueued; their
// returned Status covers the arguments alone, a fault of the work itself surfaces at Synchronize.
class Stream {
 public:
  virtual ~Stream() = default;
  // Waits for everything enqueued so far. Returns the first error since the last call; after an
  // error the rest of the queue has been dropped.
  virtual absl::Status Synchronize() = 0;
};

}  // namespace heddle
