// Decides what each step computes, and gives it pages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/page_ledger.h"
#include "runtime/sampling/sampling_params.h"
#include "runtime/step_plan.h"

namespace heddle {

struct SchedulerOptions {
  int64_t max_num_seqs = 0;
  int64_t max_num_batched_tokens = 0;  // of a step; at least max_num_seqs
  int64_t max_model_len = 0;           // prompt and output
  int64_t prefill_chunk = 0;           // of one sequence in a step; 0: what the step has left
  // False: sequences keep no pages; each step computes all their tokens from position 0, and the
  // tokens of a step take the place of the pool.
  bool use_kv_cache = true;
  bool page_table_digest = false;  // in every plan
  PageLedgerOptions cache;         // ignored without a cache
};

struct ScheduledStep {
  StepPlan plan;                      // epoch and shutdown are the coordinator's to set
  std::vector<SequenceId> sequences;  // of plan.rows
  bool empty() const { return plan.rows.empty(); }
};

// Pure and deterministic: no I/O, no clock. Owned by the coordinator and used from its thread, in
// the cycle Plan, Commit when the step has run, then Append or Finish for each row that sampled.
// Add, AddSibling and Finish may come at any moment.
//
// Rules. Sequences are served in order of arrival. A plan holds every sequence that decodes, then
// prompts in chunks while max_num_batched_tokens lasts, then new sequences while there are batch
// slots. Admission takes all its pages or none; a sequence that cannot grow preempts the newest
// that runs on pages of its pool (PageLedger::PoolOf), at worst itself. A preempted sequence keeps
// its place in the order and resumes by computing prompt and output again. So the oldest sequence
// of a pool can always go on; and none is longer than what fits alone (MaxSequenceTokens), so that
// lengths do not depend on batch mates.
class Scheduler {
 public:
  // InvalidArgument names the option and its value.
  static absl::StatusOr<std::unique_ptr<Scheduler>> Create(const SchedulerOptions& options);

  // AlreadyExists for an id that is waiting or running; InvalidArgument for an empty prompt or one
  // that leaves no room in max_model_len; ResourceExhausted, with the tokens needed and available,
  // for one that can never fit the pool. `seed` is the sequence's own. With max_tokens 0 the
  // prompt is computed and nothing sampled; Finish it after the row that ends its prompt.
  absl::Status Add(SequenceId id, std::vector<int32_t> prompt, const SamplingParams& params,
                   uint64_t seed);
  // Another sample of the prompt of `parent`, which must be waiting or running. Once the parent
  // has computed all of the prompt but its last token, the sibling shares those pages, computes
  // the last token itself and goes its own way; should the parent be gone by then, it starts like
  // any other sequence. Only the parent scores the prompt. AlreadyExists, NotFound.
  absl::Status AddSibling(SequenceId id, SequenceId parent, const SamplingParams& params,
                          uint64_t seed);

  // Empty when there is nothing to compute; it is then not run and not committed.
  ScheduledStep Plan();
  // The step has run: its tokens are stored. Rows whose sequence has been finished since are
  // ignored.
  void Commit(const ScheduledStep& step);
  // The token sampled by a row of the step just committed; ignored if the sequence is gone.
  void Append(SequenceId id, int32_t token);
  // Finished or aborted, at any moment: everything the sequence holds is released. False if there
  // is no such sequence.
  bool Finish(SequenceId id);

  // The longest that prompt and output can get.
  int64_t MaxSequenceTokens() const;
  // True once the sequence is that long: it must be finished (with "length") before the next Plan.
  bool AtLengthLimit(SequenceId id) const;

  bool Contains(SequenceId id) const { return sequences_.contains(id); }
  // Prompt tokens whose keys and values were shared, not computed, at the first admission; 0
  // before.
  int64_t NumCachedTokens(SequenceId id) const;
  std::optional<int32_t> BatchSlot(SequenceId id) const;  // while running
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_preemptions() const { return num_preemptions_; }
  const PageLedger& ledger() const { return ledger_; }

 private:
  using Serial = uint64_t;  // the order of arrival; never reused

  struct Sequence {
    SequenceId id = 0;
    Serial serial = 0;
    std::optional<Serial> parent;
    std::vector<int32_t> tokens;  // prompt, then output
    int64_t prompt_length = 0;
    int64_t num_computed = 0;  // tokens whose keys and values are stored
    SamplingParams params;
    uint64_t seed = 0;
    std::optional<int64_t> num_cached;  // unset before the first admission
    int32_t batch_slot = -1;            // -1: waiting
    // What the ranks have of the page table; unset before the first plan of a stay in the batch.
    struct SentPages {
      int64_t first = 0;
      int64_t end = 0;
    };
    std::optional<SentPages> sent;

    int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
    // Tokens to compute before the next one can be sampled.
    int64_t num_pending() const { return num_tokens() - num_computed; }
    bool samples() const { return params.max_tokens != 0; }
    // What admission reserves.
    int64_t num_needed() const { return num_tokens() + (samples() ? 1 : 0); }
  };
  enum class Admission { kDone, kAwaitsParent, kNoRoom };

  explicit Scheduler(const SchedulerOptions& options);

  absl::Status Enqueue(std::unique_ptr<Sequence> sequence);
  // Gives every running sequence room for its next token. True if that preempted one.
  bool GrowRunning();
  // Of those that run on pages of this pool; null if there are none.
  Sequence* NewestOfPool(int64_t pool);
  void LeaveBatch(Sequence& sequence);
  Admission Admit(Sequence& sequence, StepPlan& plan);
  // Gives a sibling its pages from its parent's. kNoRoom: it has to get them like any other.
  Admission ShareWithParent(Sequence& sequence, StepPlan& plan);
  // Adds a row of up to `budget` tokens of a running sequence; returns how many.
  int64_t AddRow(Sequence& sequence, int64_t budget, ScheduledStep& step);
  void AddPageDeltas(StepPlan& plan);

  const SchedulerOptions options_;
  PageLedger ledger_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::map<Serial, Sequence*> running_;
  std::map<Serial, Sequence*> waiting_;
  Serial next_serial_ = 0;
  std::set<int32_t> free_slots_;
  std::vector<int32_t> released_slots_;  // since the last plan
  int64_t num_preemptions_ = 0;
};

}  // namespace heddle
