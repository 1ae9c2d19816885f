#include "runtime/schedule/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

// Without a cache, the tokens that a step can compute are accounted for as pages of one token.
PageLedgerOptions EffectiveCache(const SchedulerOptions& options) {
  if (options.use_kv_cache) return options.cache;
  PageLedgerOptions tokens_of_a_step;
  tokens_of_a_step.page_size = 1;
  tokens_of_a_step.pages_per_stripe = options.max_num_batched_tokens;
  return tokens_of_a_step;
}

absl::Status Validate(const SchedulerOptions& options) {
  const auto refuse = [](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (options.max_num_seqs < 1 || options.max_num_seqs > kMax) {
    return refuse("max-num-seqs is ", options.max_num_seqs, "; it must be from 1 to ", kMax);
  }
  if (options.max_num_batched_tokens < options.max_num_seqs ||
      options.max_num_batched_tokens > kMax) {
    return refuse("max-num-batched-tokens is ", options.max_num_batched_tokens,
                  "; it must be from max-num-seqs (", options.max_num_seqs,
                  "), since a step holds every sequence that decodes, to ", kMax);
  }
  if (options.max_model_len < 1 || options.max_model_len > kMax) {
    return refuse("max-model-len is ", options.max_model_len, "; it must be from 1 to ", kMax);
  }
  if (options.prefill_chunk < 0) {
    return refuse("the prefill chunk is ", options.prefill_chunk, "; it must be at least 0");
  }
  return PageLedger::Validate(EffectiveCache(options));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Scheduler>> Scheduler::Create(const SchedulerOptions& options) {
  RETURN_IF_ERROR(Validate(options));
  return std::unique_ptr<Scheduler>(new Scheduler(options));
}

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options), ledger_(EffectiveCache(options)) {
  for (int32_t slot = 0; slot < options.max_num_seqs; ++slot) free_slots_.insert(slot);
}

absl::Status Scheduler::Add(SequenceId id, std::vector<int32_t> prompt,
                            const SamplingParams& params, uint64_t seed) {
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->prompt_length = static_cast<int64_t>(prompt.size());
  sequence->tokens = std::move(prompt);
  sequence->params = params;
  sequence->seed = seed;
  return Enqueue(std::move(sequence));
}

absl::Status Scheduler::AddSibling(SequenceId id, SequenceId parent, const SamplingParams& params,
                                   uint64_t seed) {
  const auto found = sequences_.find(parent);
  if (found == sequences_.end()) {
    return absl::NotFoundError(
        absl::StrCat("sequence ", parent, " is neither waiting nor running"));
  }
  const Sequence& source = *found->second;
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  // Siblings of a sibling share with its parent, so that no page is copied from a copy that the
  // same step is to make.
  sequence->parent = source.parent ? *source.parent : source.serial;
  sequence->prompt_length = source.prompt_length;
  sequence->tokens.assign(source.tokens.begin(), source.tokens.begin() + source.prompt_length);
  sequence->params = params;
  sequence->params.prompt_logprobs = false;
  sequence->params.prompt_logits = false;
  sequence->seed = seed;
  return Enqueue(std::move(sequence));
}

absl::Status Scheduler::Enqueue(std::unique_ptr<Sequence> sequence) {
  const SequenceId id = sequence->id;
  if (Contains(id)) {
    return absl::AlreadyExistsError(absl::StrCat("sequence ", id, " is waiting or running"));
  }
  const int64_t num_tokens = sequence->num_tokens();
  if (num_tokens == 0) return absl::InvalidArgumentError("the prompt has no tokens");
  const int64_t needed = sequence->num_needed();
  if (needed > options_.max_model_len) {
    return absl::InvalidArgumentError(
        absl::StrCat("a prompt of ", num_tokens, " tokens",
                     sequence->samples() ? " leaves no room for output; max-model-len is "
                                         : " is too long; max-model-len is ",
                     options_.max_model_len));
  }
  if (needed > ledger_.CapacityTokens()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a prompt of ", num_tokens, " tokens needs room for ", needed, " tokens; ",
                     options_.use_kv_cache ? "the KV cache has " : "a step without a KV cache has ",
                     ledger_.CapacityTokens()));
  }
  sequence->serial = next_serial_++;
  waiting_.emplace(sequence->serial, sequence.get());
  sequences_.emplace(id, std::move(sequence));
  return absl::OkStatus();
}

ScheduledStep Scheduler::Plan() {
  ScheduledStep step;
  const bool preempted = GrowRunning();
  int64_t budget = options_.max_num_batched_tokens;
  for (const auto& [serial, sequence] : running_) {
    if (sequence->num_pending() == 1) budget -= AddRow(*sequence, budget, step);
  }
  for (const auto& [serial, sequence] : running_) {
    if (sequence->num_pending() > 1) budget -= AddRow(*sequence, budget, step);
  }
  // Where one was just preempted, a newcomer would be the next.
  auto next = preempted ? waiting_.end() : waiting_.begin();
  while (next != waiting_.end() && budget > 0 && !free_slots_.empty()) {
    Sequence& sequence = *(next++)->second;
    const Admission admission = Admit(sequence, step.plan);
    if (admission == Admission::kNoRoom) break;  // nobody overtakes
    if (admission == Admission::kDone) budget -= AddRow(sequence, budget, step);
  }
  if (step.empty()) return step;
  step.plan.released_slots = std::exchange(released_slots_, {});
  if (options_.use_kv_cache) AddPageDeltas(step.plan);
  return step;
}

bool Scheduler::GrowRunning() {
  bool preempted = false;
  // Both this sequence and the one behind it may leave on the way.
  Serial serial = 0;
  for (auto next = running_.begin(); next != running_.end(); next = running_.upper_bound(serial)) {
    Sequence& sequence = *next->second;
    serial = sequence.serial;
    CHECK(sequence.num_pending() > 0 && (!sequence.samples() || !AtLengthLimit(sequence.id)))
        << "sequence " << sequence.id << " was neither continued nor finished";
    const int64_t num_needed =
        options_.use_kv_cache ? sequence.num_computed + 1 : sequence.num_tokens();
    const int64_t pool = ledger_.PoolOf(sequence.id);
    bool runs = true;
    while (runs && !ledger_.Reserve(sequence.id, num_needed)) {
      Sequence* const newest = NewestOfPool(pool);
      runs = newest != &sequence;
      LeaveBatch(*newest);
      waiting_.emplace(newest->serial, newest);
      ++num_preemptions_;
      preempted = true;
      CHECK(runs || NewestOfPool(pool) != nullptr) << "a sequence that is alone does not fit";
    }
  }
  return preempted;
}

Scheduler::Sequence* Scheduler::NewestOfPool(int64_t pool) {
  const auto newest = std::find_if(running_.rbegin(), running_.rend(), [&](const auto& entry) {
    return ledger_.PoolOf(entry.second->id) == pool;
  });
  return newest == running_.rend() ? nullptr : newest->second;
}

void Scheduler::LeaveBatch(Sequence& sequence) {
  ledger_.Release(sequence.id);
  running_.erase(sequence.serial);
  free_slots_.insert(sequence.batch_slot);
  released_slots_.push_back(sequence.batch_slot);
  sequence.batch_slot = -1;
  sequence.num_computed = 0;
  sequence.sent.reset();
}

Scheduler::Admission Scheduler::Admit(Sequence& sequence, StepPlan& plan) {
  Admission admission = ShareWithParent(sequence, plan);
  if (admission == Admission::kAwaitsParent) return admission;
  if (admission == Admission::kNoRoom) {
    const auto shared = ledger_.Admit(sequence.id, sequence.tokens, sequence.num_needed(),
                                      {.reuse = !sequence.params.ScoresPrompt(), .salt = {}});
    if (!shared.ok()) return Admission::kNoRoom;
    sequence.num_computed = *shared;
  }
  if (!sequence.num_cached) sequence.num_cached = sequence.num_computed;
  sequence.batch_slot = *free_slots_.begin();
  free_slots_.erase(free_slots_.begin());
  waiting_.erase(sequence.serial);
  running_.emplace(sequence.serial, &sequence);
  plan.admissions.push_back({.batch_slot = sequence.batch_slot,
                             .params = sequence.params,
                             .seed = sequence.seed,
                             .prompt_length = sequence.prompt_length,
                             .token_ids = sequence.tokens});
  return Admission::kDone;
}

Scheduler::Admission Scheduler::ShareWithParent(Sequence& sequence, StepPlan& plan) {
  // One that resumes has output of its own, which the prefix index may know.
  if (!sequence.parent || sequence.num_cached || !options_.use_kv_cache) return Admission::kNoRoom;
  const auto parent = running_.find(*sequence.parent);
  if (parent == running_.end()) return Admission::kNoRoom;
  const int64_t num_shared = sequence.prompt_length - 1;
  if (parent->second->num_computed < num_shared) return Admission::kAwaitsParent;
  const auto copy =
      ledger_.Fork(parent->second->id, sequence.id, num_shared, sequence.num_needed());
  if (!copy.ok()) return Admission::kNoRoom;
  sequence.num_computed = num_shared;
  if (*copy) {
    plan.page_ops.push_back(
        {.kind = PageOp::Kind::kCopy, .source = (*copy)->source, .target = (*copy)->target});
  }
  return Admission::kDone;
}

int64_t Scheduler::AddRow(Sequence& sequence, int64_t budget, ScheduledStep& step) {
  int64_t run = sequence.num_pending();
  if (options_.use_kv_cache) {
    if (options_.prefill_chunk > 0) run = std::min(run, options_.prefill_chunk);
    // With a window, the pages of a whole prompt were not reserved: take what there is.
    run = std::min({run, budget, ledger_.ReservableTokens(sequence.id) - sequence.num_computed});
    if (run == 0) return 0;
    CHECK(ledger_.Reserve(sequence.id, sequence.num_computed + run));
  }
  CHECK_LE(run, budget);
  step.plan.rows.push_back({.batch_slot = sequence.batch_slot,
                            .query_length = static_cast<int32_t>(run),
                            .first_position = static_cast<int32_t>(sequence.num_computed),
                            .sample = run == sequence.num_pending() && sequence.samples()});
  step.sequences.push_back(sequence.id);
  return run;
}

void Scheduler::AddPageDeltas(StepPlan& plan) {
  plan.has_digest = options_.page_table_digest;
  for (const auto& [serial, sequence] : running_) {
    const PageTable& table = ledger_.table(sequence->id);
    const Sequence::SentPages sent =
        sequence->sent.value_or(Sequence::SentPages{0, table.first_page});
    if (!sequence->sent || table.first_page != sent.first || table.end_page() != sent.end) {
      PageTableDelta& delta = plan.page_deltas.emplace_back();
      delta.batch_slot = sequence->batch_slot;
      delta.reset = !sequence->sent;
      delta.num_dropped_front = static_cast<int32_t>(table.first_page - sent.first);
      delta.appended.assign(table.pages.begin() + (sent.end - table.first_page), table.pages.end());
      sequence->sent = {table.first_page, table.end_page()};
    }
    if (plan.has_digest) plan.page_table_digest += DigestPageTable(sequence->batch_slot, table);
  }
}

void Scheduler::Commit(const ScheduledStep& step) {
  if (!options_.use_kv_cache) return;
  for (size_t i = 0; i < step.plan.rows.size(); ++i) {
    const PlanRow& row = step.plan.rows[i];
    const auto found = sequences_.find(step.sequences[i]);
    // An id that ended and came back since is waiting.
    if (found == sequences_.end() || found->second->batch_slot != row.batch_slot) continue;
    Sequence& sequence = *found->second;
    CHECK_EQ(sequence.num_computed, row.first_position);
    sequence.num_computed += row.query_length;
    ledger_.Commit(sequence.id, sequence.tokens, sequence.num_computed);
  }
}

void Scheduler::Append(SequenceId id, int32_t token) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end() || found->second->batch_slot < 0) return;
  Sequence& sequence = *found->second;
  CHECK(!options_.use_kv_cache || sequence.num_pending() == 0)
      << "sequence " << id << " has not sampled";
  sequence.tokens.push_back(token);
}

bool Scheduler::Finish(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  Sequence& sequence = *found->second;
  if (sequence.batch_slot >= 0) {
    LeaveBatch(sequence);
  } else {
    waiting_.erase(sequence.serial);
  }
  sequences_.erase(found);
  return true;
}

int64_t Scheduler::MaxSequenceTokens() const {
  return std::min(options_.max_model_len, ledger_.CapacityTokens());
}

bool Scheduler::AtLengthLimit(SequenceId id) const {
  return sequences_.at(id)->num_tokens() >= MaxSequenceTokens();
}

int64_t Scheduler::NumCachedTokens(SequenceId id) const {
  return sequences_.at(id)->num_cached.value_or(0);
}

std::optional<int32_t> Scheduler::BatchSlot(SequenceId id) const {
  const int32_t slot = sequences_.at(id)->batch_slot;
  return slot < 0 ? std::nullopt : std::optional(slot);
}

}  // namespace heddle
