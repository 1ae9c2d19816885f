// Stands in for the coordinator: submits, steps, and holds every token against the model's own.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "runtime/schedule/scheduler.h"
#include "tests/runtime/schedule/fake_rank.h"

namespace heddle {

// A request as the driver knows it.
struct Job {
  std::vector<int32_t> prompt;
  std::vector<int32_t> output;
  int64_t max_tokens = 0;
  uint64_t seed = 0;
  uint64_t arrival = 0;
  bool sibling = false;
  bool finished = false;  // false in `ended`: aborted
};

class Driver {
 public:
  // The options must be valid.
  explicit Driver(const SchedulerOptions& options);

  absl::Status Add(SequenceId id, std::vector<int32_t> prompt, int64_t max_tokens,
                   uint64_t seed = 0, bool score = false);
  absl::Status AddSibling(SequenceId id, SequenceId parent, int64_t max_tokens, uint64_t seed);
  void Abort(SequenceId id);

  // One cycle; `between` runs after the plan, after the commit, and before each append. False, and
  // nothing is run, if there was nothing to do.
  bool Step(const std::function<void()>& between = [] {});
  // Until there is nothing to do; checks that the pool is then empty. The number of steps.
  int64_t Drain();

  // After each operation of a test: the ledger's own invariants.
  void CheckIntegrity() const;

  Scheduler& scheduler() { return *scheduler_; }
  const std::map<SequenceId, Job>& running_or_waiting() const { return jobs_; }
  // The last that ended under this id.
  const Job& ended(SequenceId id) const { return ended_.at(id); }
  bool has_ended(SequenceId id) const { return ended_.contains(id); }
  int64_t cached_tokens(SequenceId id) const { return cached_tokens_.at(id); }
  const ScheduledStep& last_step() const { return last_step_; }

 private:
  absl::Status Register(SequenceId id, absl::Status status, Job job);
  // `pools` are those of the jobs that ran.
  void CheckOrder(const std::map<SequenceId, Job>& before,
                  const std::map<SequenceId, int64_t>& pools) const;
  // Right after Commit: records what a row sampled, and finishes the job when it is complete.
  void Take(SequenceId id, std::optional<int32_t> token);
  void End(SequenceId id, bool finished);

  SchedulerOptions options_;
  std::unique_ptr<Scheduler> scheduler_;
  FakeRank rank_;
  std::map<SequenceId, Job> jobs_;
  std::map<SequenceId, Job> ended_;
  std::map<SequenceId, int64_t> cached_tokens_;
  uint64_t next_arrival_ = 0;
  ScheduledStep last_step_;
};

// What the model says of a prompt, with neither batch nor cache.
std::vector<int32_t> Continuation(const std::vector<int32_t>& prompt, uint64_t seed, int64_t size);

}  // namespace heddle
