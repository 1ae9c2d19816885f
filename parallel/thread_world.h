// A job whose ranks are threads of one process: for tests, sanitizers and single-rank runs.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "parallel/world.h"

namespace heddle {

struct ThreadWorldOptions {
  int size = 1;
  // Ranks that share memory; groups of this size pretend to be nodes of their own and talk as MPI
  // ranks of different hosts do. 0: all on one node.
  int ranks_per_node = 0;
  double progress_timeout_seconds = 60;
};

// Same collectives, same waits and same watch over peers as between processes; only the memory is
// the process's own. Must outlive the Worlds it hands out.
class ThreadWorld {
 public:
  // InvalidArgument on counts below one.
  static absl::StatusOr<std::unique_ptr<ThreadWorld>> Create(const ThreadWorldOptions& options);
  virtual ~ThreadWorld() = default;

  // The part of `rank`, once per rank, from any thread. Giving up a World while other ranks wait
  // for it ends the job, as a process that exits does.
  virtual World Join(int rank) = 0;

  // Joins every rank on a thread of its own, runs `body`, and waits for all. A body that returns an
  // error aborts the job with it. The result holds each rank's status.
  std::vector<absl::Status> Run(const std::function<absl::Status(World& world)>& body);

 protected:
  explicit ThreadWorld(int size) : size_(size) {}

 private:
  const int size_;
};

}  // namespace heddle
