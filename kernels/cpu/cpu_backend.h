// The CPU as a device.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/cpu/thread_pool.h"

namespace heddle {

// When a CPU stream runs what is enqueued: at once, or only at Synchronize, as a GPU might. The
// second exists so that tests find code that reads a result, or overwrites an input, too early.
enum class CpuStreamMode { kImmediate, kDeferred };

// The stream of ops and collectives of a CPU rank. Work runs on the thread that enqueues or
// synchronises, and may use the rank's pool.
class CpuStream : public Stream {
 public:
  using Work = std::function<absl::Status(CpuThreadPool& pool)>;

  // Runs `work` now or at Synchronize; dropped if an earlier work of the queue failed.
  virtual void Enqueue(Work work) = 0;

  // The CpuStream behind `stream`, which must belong to a CPU backend.
  static CpuStream& From(Stream& stream);
};

struct CpuBackendOptions {
  int num_threads = 1;
  bool oversubscribed = false;  // the ranks of this host have more threads than CPUs
  CpuStreamMode stream_mode = CpuStreamMode::kImmediate;
};

std::unique_ptr<Backend> CreateCpuBackend(const CpuBackendOptions& options);

}  // namespace heddle
