// The persistent threads of one CPU rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace heddle {

// Owned by the CPU backend of a rank. The caller takes part as thread 0, so a pool of one spawns
// nothing. Threads that wait spin for at most 50 us, then sleep; when the host runs more ranks
// than it has CPUs they yield instead of spinning. Not re-entrant: one ParallelRun at a time, from
// the rank's worker thread.
class CpuThreadPool {
 public:
  // num_threads >= 1. `oversubscribed`: the ranks of this host have more threads than CPUs.
  explicit CpuThreadPool(int num_threads, bool oversubscribed = false);
  CpuThreadPool(const CpuThreadPool&) = delete;
  CpuThreadPool& operator=(const CpuThreadPool&) = delete;
  ~CpuThreadPool();

  int num_threads() const;

  // Runs body(thread) once on each of the threads [0, num_threads) and waits for all.
  void ParallelRun(absl::FunctionRef<void(int thread)> body);

  // Runs body(task) for each task of [0, num_tasks), dealt dynamically one by one.
  void ParallelFor(int64_t num_tasks, absl::FunctionRef<void(int64_t task)> body);

  // Working memory of the op that runs now, at least `bytes` long, aligned to 128 bytes, with
  // undefined contents. Lent until the op ends or asks again; only the caller's thread may ask.
  std::byte* Scratch(size_t bytes);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// CPUs that this process may use, from its affinity mask; at least 1.
int NumAllowedCpus();

}  // namespace heddle
