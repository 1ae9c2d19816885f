// What the makers of worlds (threads, MPI) have in common: the layout of a node's window and the
// objects of a rank on top of it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "parallel/endpoint.h"
#include "parallel/world.h"

namespace heddle {

struct HostWorldOptions {
  double progress_timeout_seconds = 60;
  bool yields = false;                       // see Endpoint
  std::function<void()> terminate_job = {};  // see WatchThread
};

// Bytes of the window of `node`, and their layout by one of its ranks.
size_t HostWindowBytes(const std::vector<RankPlace>& places, int node);
void FormatHostWindow(void* memory, const std::vector<RankPlace>& places, int node);

// Heap for a window whose ranks are all in this process.
std::shared_ptr<void> AllocateHeapWindow(size_t bytes);

// ResourceExhausted, with what to change, if the shared-memory file system cannot hold the window.
absl::Status CheckSharedMemoryRoom(uint64_t free_bytes, uint64_t needed_bytes);

// After the rank's window was formatted. `link` may be null when there is one node.
World MakeHostWorld(int rank, const std::vector<RankPlace>& places,
                    std::shared_ptr<void> window_memory, std::unique_ptr<PeerLink> link,
                    const HostWorldOptions& options);

}  // namespace heddle
