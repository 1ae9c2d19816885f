// The control plane: small host messages between rank 0 and all ranks, and the job's life and
// death.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// Owned by one rank. The message calls come from one thread at a time and in the same order on all
// ranks; the rest may be called from any thread.
//
// There is no deadline on time, only on time without progress. Each rank's process shows a sign of
// life by itself; a rank that computes must also call ReportProgress (a layer, a chunk of a file)
// more often than the timeout. Waiting in a collective or for the next Broadcast, or being idle
// (IdleScope), needs no report. The job ends with an error that names the rank and its host when
//   - a process is stopped, or a busy rank reports nothing, for the timeout;
//   - a process has died or a rank has left while others wait for it (within seconds);
//   - ranks wait in collectives that do not match, for the timeout;
//   - any rank calls Abort.
// From then on every wait, also those of communicators, returns that error on every rank.
class ControlChannel {
 public:
  virtual ~ControlChannel() = default;

  // Rank 0's `message` is copied to all; the others' is replaced. Rank 0 goes on without waiting
  // for the readers, up to the room of a few messages. To the others this is the idle wait.
  virtual absl::Status Broadcast(std::string& message) = 0;

  // Rank 0 receives all ranks' messages in rank order, its own included; others an empty vector.
  virtual absl::StatusOr<std::vector<std::string>> Gather(absl::string_view message) = 0;

  // What all ranks agree on: the smallest value. For pool sizes.
  virtual absl::StatusOr<int64_t> AllReduceMin(int64_t value) = 0;

  virtual absl::Status Barrier() = 0;

  virtual void ReportProgress() = 0;

  // Ends the job. The first error wins; its text, with this rank's name, is printed once on rank
  // 0's stderr (here if rank 0 cannot). Returns when that is done, at most a second later; the
  // caller then leaves with a non-zero exit code and without further collectives.
  virtual void Abort(const absl::Status& status) = 0;

  // OK until some rank aborts; then the job's first error.
  virtual absl::Status abort_status() const = 0;

 private:
  friend class IdleScope;
  virtual void SetIdle(bool idle) = 0;
};

// While it lives the rank owes no progress: rank 0 between requests. One at a time per rank.
class IdleScope {
 public:
  explicit IdleScope(ControlChannel& channel) : channel_(channel) { channel_.SetIdle(true); }
  ~IdleScope() { channel_.SetIdle(false); }
  IdleScope(const IdleScope&) = delete;
  IdleScope& operator=(const IdleScope&) = delete;

 private:
  ControlChannel& channel_;
};

}  // namespace heddle
