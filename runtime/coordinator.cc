#include "runtime/coordinator.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/random_seed.h"

namespace heddle {

Coordinator::Coordinator(Options options, std::unique_ptr<Scheduler> scheduler,
                         const Tokenizer* tokenizer, std::function<void(RequestOutput)> on_output)
    : options_(std::move(options)),
      tokenizer_(tokenizer),
      on_output_(std::move(on_output)),
      scheduler_(std::move(scheduler)) {}

void Coordinator::Add(AdmittedRequest admitted) {
  auto request = std::make_unique<ActiveRequest>();
  request->admitted = std::move(admitted);
  ActiveRequest& active = *request;
  requests_[active.admitted.id] = std::move(request);
  stats_.num_prompt_tokens += static_cast<int64_t>(active.admitted.prompt_token_ids.size());
  const SamplingParams& params = active.admitted.params;
  active.num_unfinished = params.n;
  for (int64_t index = 0; index < params.n; ++index) StartSequence(active, index);
  if (active.admitted.max_tokens == 0) {
    // Nothing to compute but, perhaps, the scores of the first one's prompt.
    std::vector<SequenceId> ids = active.sequences;  // the request goes with its last one
    if (params.ScoresPrompt()) ids.erase(ids.begin());
    for (const SequenceId id : ids) EndSequence(id, FinishReason::kLength, absl::OkStatus());
  }
}

void Coordinator::StartSequence(ActiveRequest& request, int64_t index) {
  const AdmittedRequest& admitted = request.admitted;
  const SequenceId id = next_sequence_++;
  sequences_.emplace(
      id, ActiveSequence{&request, index,
                         OutputSequence(admitted.params, tokenizer_, options_.eos_token_ids,
                                        std::max<int64_t>(admitted.max_tokens, 1))});
  const uint64_t seed = MixSeeds(admitted.seed, static_cast<uint64_t>(index));
  // The door has checked what could be refused.
  if (index == 0) {
    CHECK_OK(scheduler_->Add(id, admitted.prompt_token_ids, admitted.params, seed));
  } else {
    // Only the first sequence scores the prompt.
    SamplingParams params = admitted.params;
    params.prompt_logprobs = params.prompt_logits = false;
    CHECK_OK(scheduler_->AddSibling(id, request.sequences.front(), params, seed));
  }
  request.sequences.push_back(id);
}

void Coordinator::Abort(absl::string_view id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return;
  const std::vector<SequenceId> ids = found->second->sequences;
  for (const SequenceId sequence : ids) {
    if (sequences_.contains(sequence)) {
      EndSequence(sequence, FinishReason::kAbort, absl::OkStatus());
    }
  }
}

void Coordinator::FailAll(const absl::Status& why) {
  std::vector<SequenceId> ids;
  for (const auto& [id, sequence] : sequences_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const SequenceId id : ids) EndSequence(id, FinishReason::kError, why);
}

void Coordinator::EndSequence(SequenceId id, FinishReason reason, const absl::Status& error) {
  OutputSequence::Piece piece = sequences_.at(id).output.End(reason);
  RequestOutput output;
  output.text = std::move(piece.text);
  output.finish_reason = piece.finish_reason;
  output.error = error;
  Emit(id, std::move(output));
}

void Coordinator::Emit(SequenceId id, RequestOutput output) {
  ActiveSequence& sequence = sequences_.at(id);
  ActiveRequest& request = *sequence.request;
  output.id = request.admitted.id;
  output.index = sequence.index;
  if (!sequence.started) {
    sequence.started = true;
    output.prompt_token_ids = request.admitted.prompt_token_ids;
    output.cached_tokens = scheduler_->NumCachedTokens(id);
    stats_.num_cached_tokens += output.cached_tokens;
    if (sequence.index == 0) {
      output.prompt_logprobs = std::move(request.prompt_logprobs);
      output.prompt_logits = std::move(request.prompt_logits);
    }
  }
  const bool finished = output.finish_reason != FinishReason::kUnfinished;
  if (finished) {
    ++(output.finish_reason == FinishReason::kError ? stats_.num_failed_sequences
                                                    : stats_.num_finished_sequences);
    scheduler_->Finish(id);
    sequences_.erase(id);
    if (--request.num_unfinished == 0) requests_.erase(output.id);
  }
  on_output_(std::move(output));
}

absl::Status Coordinator::Step(Worker& worker, ControlChannel& control) {
  ScheduledStep step = scheduler_->Plan();
  if (options_.verify_every_step) RETURN_IF_ERROR(scheduler_->ledger().CheckIntegrity());
  if (step.empty()) return absl::OkStatus();  // a sequence made room for others; plan again
  StepPlan& plan = step.plan;
  plan.epoch = ++epoch_;
  std::string message = SerializeStepPlan(plan);
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(control.Broadcast(message));
  ASSIGN_OR_RETURN(const StepResult result, worker.Execute(plan));
  scheduler_->Commit(step);
  CountStep(plan, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());

  for (const StepResult::PromptScore& score : result.prompt_scores) {
    const SequenceId id = step.sequences[score.row];
    const absl::Status scored = TakePromptScore(id, plan.rows[score.row], score);
    if (!scored.ok()) EndSequence(id, FinishReason::kError, scored);
  }
  size_t next_sample = 0;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const SequenceId id = step.sequences[i];
    const bool ended = !sequences_.contains(id);
    if (plan.rows[i].sample) {
      const SampledToken& sample = result.samples[next_sample++];
      if (!ended) TakeSample(id, sample);
    } else if (!ended && EndsPromptOnly(id, plan.rows[i])) {
      EndSequence(id, FinishReason::kLength, absl::OkStatus());
    }
  }
  return options_.verify_every_step ? CheckPages() : absl::OkStatus();
}

absl::Status Coordinator::CheckPages() const {
  const PageLedger& ledger = scheduler_->ledger();
  RETURN_IF_ERROR(ledger.CheckIntegrity());
  if (idle() && ledger.num_live_pages() != 0) {
    return absl::InternalError(
        absl::StrCat(ledger.num_live_pages(), " pages are held although no request is left"));
  }
  return absl::OkStatus();
}

bool Coordinator::EndsPromptOnly(SequenceId id, const PlanRow& row) const {
  const AdmittedRequest& admitted = sequences_.at(id).request->admitted;
  return admitted.max_tokens == 0 && row.first_position + row.query_length ==
                                         static_cast<int64_t>(admitted.prompt_token_ids.size());
}

absl::Status Coordinator::TakePromptScore(SequenceId id, const PlanRow& row,
                                          const StepResult::PromptScore& score) {
  ActiveRequest& request = *sequences_.at(id).request;
  // After a preemption the prompt comes again from its start: what is known already is dropped.
  std::vector<float>& logprobs = request.prompt_logprobs;
  if (logprobs.empty()) logprobs.push_back(0.0f);  // the first token has none
  for (size_t i = 0; i < score.logprobs.size(); ++i) {
    if (std::isnan(score.logprobs[i])) {
      return absl::DataLossError(
          absl::StrCat("the logits of position ", row.first_position + i, " are not finite"));
    }
    if (row.first_position + i + 1 == logprobs.size()) logprobs.push_back(score.logprobs[i]);
  }
  std::vector<float>& logits = request.prompt_logits;
  const auto vocab_size = static_cast<size_t>(options_.vocab_size);
  for (size_t i = 0; i * vocab_size < score.logits.size(); ++i) {
    if ((row.first_position + i) * vocab_size != logits.size()) continue;
    const float* begin = score.logits.data() + i * vocab_size;
    logits.insert(logits.end(), begin, begin + vocab_size);
  }
  return absl::OkStatus();
}

void Coordinator::TakeSample(SequenceId id, const SampledToken& sample) {
  ActiveSequence& sequence = sequences_.at(id);
  if (!sample.status.ok()) {
    EndSequence(id, FinishReason::kError, sample.status);
    return;
  }
  ++stats_.num_generated_tokens;
  RequestOutput output;
  output.token_ids = {sample.token_id};
  if (sequence.request->admitted.params.logprobs >= 0) {
    output.logprobs.push_back({{sample.token_id, sample.logprob}, sample.top_logprobs});
  }
  OutputSequence::Piece piece = sequence.output.Push(sample.token_id);
  output.text = std::move(piece.text);
  output.finish_reason = piece.finish_reason;
  if (output.finish_reason == FinishReason::kUnfinished) scheduler_->Append(id, sample.token_id);
  Emit(id, std::move(output));
}

absl::Status Coordinator::Shutdown(ControlChannel& control) {
  StepPlan plan;
  plan.epoch = ++epoch_;
  plan.shutdown = true;
  std::string message = SerializeStepPlan(plan);
  return control.Broadcast(message);
}

void Coordinator::CountStep(const StepPlan& plan, double seconds) {
  ++stats_.num_steps;
  stats_.step_seconds += seconds;
  stats_.num_scheduled_sequences += static_cast<int64_t>(plan.rows.size());
  stats_.num_computed_tokens += plan.NumTokens();
  for (const PlanRow& row : plan.rows) {
    if (row.query_length == 1) stats_.kv_tokens_read += row.first_position + 1;
  }
  const PageLedger& ledger = scheduler_->ledger();
  if (ledger.num_pages() == 0) return;
  waste_sum_ += ledger.Waste();
  stats_.kv_usage_peak =
      std::max(stats_.kv_usage_peak, static_cast<double>(ledger.num_live_pages()) /
                                         static_cast<double>(ledger.num_pages()));
}

EngineStats Coordinator::stats() const {
  EngineStats stats = stats_;
  stats.num_running = scheduler_->num_running();
  stats.num_waiting = scheduler_->num_waiting();
  stats.num_preemptions = scheduler_->num_preemptions() - stats_.num_preemptions;
  stats.kv_waste = stats.num_steps > 0 ? waste_sum_ / static_cast<double>(stats.num_steps) : 0.0;
  return stats;
}

void Coordinator::ResetStats() {
  stats_ = EngineStats();
  stats_.num_preemptions = scheduler_->num_preemptions();  // counted from here
  waste_sum_ = 0;
}

}  // namespace heddle
