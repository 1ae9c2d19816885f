#include "tests/runtime/schedule/driver.h"

#include <algorithm>
#include <utility>

#include "gtest/gtest.h"

namespace heddle {

std::vector<int32_t> Continuation(const std::vector<int32_t>& prompt, uint64_t seed, int64_t size) {
  uint64_t state = kEmptyState;
  for (const int32_t token : prompt) state = FoldToken(state, token);
  std::vector<int32_t> output;
  while (std::ssize(output) < size) {
    output.push_back(NextToken(state, seed));
    state = FoldToken(state, output.back());
  }
  return output;
}

Driver::Driver(const SchedulerOptions& options) : options_(options), rank_(options) {
  auto scheduler = Scheduler::Create(options);
  EXPECT_TRUE(scheduler.ok()) << scheduler.status();
  scheduler_ = *std::move(scheduler);
}

absl::Status Driver::Register(SequenceId id, absl::Status status, Job job) {
  EXPECT_TRUE(status.code() != absl::StatusCode::kAlreadyExists || jobs_.contains(id));
  if (status.ok()) {
    EXPECT_FALSE(jobs_.contains(id));
    job.arrival = next_arrival_++;
    jobs_.emplace(id, std::move(job));
  }
  return status;
}

absl::Status Driver::Add(SequenceId id, std::vector<int32_t> prompt, int64_t max_tokens,
                         uint64_t seed, bool score) {
  SamplingParams params;
  params.max_tokens = max_tokens;
  params.prompt_logprobs = score;
  Job job;
  job.prompt = prompt;
  job.max_tokens = max_tokens;
  job.seed = seed;
  return Register(id, scheduler_->Add(id, std::move(prompt), params, seed), std::move(job));
}

absl::Status Driver::AddSibling(SequenceId id, SequenceId parent, int64_t max_tokens,
                                uint64_t seed) {
  SamplingParams params;
  params.max_tokens = max_tokens;
  Job job;
  if (jobs_.contains(parent)) job.prompt = jobs_.at(parent).prompt;
  job.max_tokens = max_tokens;
  job.seed = seed;
  job.sibling = true;
  return Register(id, scheduler_->AddSibling(id, parent, params, seed), std::move(job));
}

void Driver::End(SequenceId id, bool finished) {
  cached_tokens_[id] = scheduler_->NumCachedTokens(id);
  EXPECT_TRUE(scheduler_->Finish(id));
  EXPECT_FALSE(scheduler_->Finish(id));
  Job job = std::move(jobs_.at(id));
  job.finished = finished;
  jobs_.erase(id);
  ended_.insert_or_assign(id, std::move(job));
}

void Driver::Abort(SequenceId id) { End(id, /*finished=*/false); }

void Driver::Take(SequenceId id, std::optional<int32_t> token) {
  // A row of a job that ended while the step ran; its id may be in use again, but not running.
  if (!jobs_.contains(id) || !scheduler_->BatchSlot(id)) {
    if (token) scheduler_->Append(id, *token);
    return;
  }
  Job& job = jobs_.at(id);
  if (!token) {
    const PlanRow* row = nullptr;
    for (size_t i = 0; i < last_step_.sequences.size(); ++i) {
      if (last_step_.sequences[i] == id) row = &last_step_.plan.rows[i];
    }
    if (job.max_tokens == 0 && row->first_position + row->query_length == std::ssize(job.prompt)) {
      End(id, /*finished=*/true);
    }
    return;
  }
  job.output.push_back(*token);
  scheduler_->Append(id, *token);
  if (std::ssize(job.output) == job.max_tokens || scheduler_->AtLengthLimit(id)) {
    EXPECT_LE(std::ssize(job.prompt) + std::ssize(job.output), scheduler_->MaxSequenceTokens());
    EXPECT_EQ(job.output, Continuation(job.prompt, job.seed, std::ssize(job.output)));
    End(id, /*finished=*/true);
  }
}

void Driver::CheckOrder(const std::map<SequenceId, Job>& before,
                        const std::map<SequenceId, int64_t>& pools) const {
  std::map<int64_t, uint64_t> oldest_preempted;  // by pool
  uint64_t newest_admitted = 0;
  bool any_admitted = false;
  for (const auto& [id, job] : before) {
    const bool ran = pools.contains(id);
    const bool runs = scheduler_->BatchSlot(id).has_value();
    if (ran && !runs) {
      uint64_t& oldest = oldest_preempted.emplace(pools.at(id), job.arrival).first->second;
      oldest = std::min(oldest, job.arrival);
    }
    if (!ran && runs) {
      any_admitted = true;
      newest_admitted = std::max(newest_admitted, job.arrival);
    }
  }
  EXPECT_FALSE(!oldest_preempted.empty() && any_admitted) << "admits where there is no room";
  for (const auto& [id, job] : before) {
    if (scheduler_->BatchSlot(id)) {
      const auto oldest = oldest_preempted.find(scheduler_->ledger().PoolOf(id));
      if (oldest == oldest_preempted.end()) continue;
      EXPECT_LT(job.arrival, oldest->second) << "an older one was preempted";
    } else if (any_admitted && !job.sibling) {
      EXPECT_GT(job.arrival, newest_admitted) << "sequence " << id << " was overtaken";
    }
  }
}

bool Driver::Step(const std::function<void()>& between) {
  std::map<SequenceId, int64_t> pools;
  for (const auto& [id, job] : jobs_) {
    if (scheduler_->BatchSlot(id)) pools[id] = scheduler_->ledger().PoolOf(id);
  }
  last_step_ = scheduler_->Plan();
  CheckIntegrity();
  EXPECT_EQ(last_step_.empty(), jobs_.empty()) << "no progress although there is work";
  if (last_step_.empty()) return false;
  EXPECT_EQ(last_step_.sequences.size(), last_step_.plan.rows.size());
  for (size_t i = 0; i < last_step_.sequences.size(); ++i) {
    EXPECT_EQ(scheduler_->BatchSlot(last_step_.sequences[i]), last_step_.plan.rows[i].batch_slot);
  }
  CheckOrder(jobs_, pools);
  between();
  const std::vector<std::optional<int32_t>> sampled = rank_.Execute(last_step_.plan);
  scheduler_->Commit(last_step_);
  CheckIntegrity();
  between();
  for (size_t i = 0; i < sampled.size(); ++i) {
    between();
    Take(last_step_.sequences[i], sampled[i]);
    CheckIntegrity();
  }
  return true;
}

int64_t Driver::Drain() {
  int64_t num_steps = 0;
  while (Step()) {
    if (++num_steps > 100'000 || testing::Test::HasFailure()) {
      ADD_FAILURE() << "does not drain";
      break;
    }
  }
  EXPECT_EQ(scheduler_->num_running(), 0);
  EXPECT_EQ(scheduler_->num_waiting(), 0);
  EXPECT_EQ(scheduler_->ledger().num_live_pages(), 0);
  EXPECT_EQ(scheduler_->ledger().Waste(), 0.0);
  return num_steps;
}

void Driver::CheckIntegrity() const {
  const absl::Status status = scheduler_->ledger().CheckIntegrity();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(scheduler_->num_running() + scheduler_->num_waiting(), std::ssize(jobs_));
}

}  // namespace heddle
