// Messages between ranks that share no memory.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heddle {

// A message on its way. Owned by whoever started it; given up before it is complete only when the
// job ends.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Whether the buffer may be used again (send) or holds the message (receive). Never waits; once
  // true it stays true.
  virtual absl::StatusOr<bool> Test() = 0;
};

// Between two ranks, messages of one tag arrive in the order in which they were started. Sizes are
// agreed beforehand. Thread-safe, but for ordering: one thread at a time per peer and tag.
class PeerLink {
 public:
  virtual ~PeerLink() = default;
  // The buffer stays untouched until the transfer is complete. `peer` is a world rank.
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Send(int peer, int tag, const void* data,
                                                         int64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Recv(int peer, int tag, void* data,
                                                         int64_t bytes) = 0;
};

// Who uses which tag.
inline constexpr int kNodeStatusTag = 1;
inline constexpr int kControlTag = 2;
inline constexpr int kFirstCommunicatorTag = 16;  // the world's; those split off follow

}  // namespace heddle
