#include "tests/runtime/schedule/fake_rank.h"

#include <algorithm>
#include <set>

#include "gtest/gtest.h"

namespace heddle {

uint64_t FoldToken(uint64_t state, int32_t token) {
  state = (state ^ (static_cast<uint64_t>(token) + 1)) * 0x9E3779B97F4A7C15;
  return state ^ (state >> 29);
}

int32_t NextToken(uint64_t state, uint64_t seed) {
  return static_cast<int32_t>(FoldToken(state, static_cast<int32_t>(seed)) % kFakeVocabSize);
}

FakeRank::FakeRank(const SchedulerOptions& options) : options_(options) {
  if (!options.use_kv_cache) return;
  for (int32_t stripe = 0; stripe < options.cache.num_stripes; ++stripe) {
    for (int32_t slot = 0; slot < options.cache.pages_per_stripe; ++slot) {
      pages_[{stripe, slot}].resize(options.cache.page_size);
    }
  }
}

uint64_t& FakeRank::StateAt(const Slot& slot, int64_t position) {
  const int64_t entry = position / options_.cache.page_size - slot.table.first_page;
  EXPECT_GE(entry, 0) << "position " << position << " has left the table";
  EXPECT_LT(entry, std::ssize(slot.table.pages)) << "position " << position << " has no page";
  const PageLocation page = slot.table.pages.at(entry);
  return pages_.at({page.stripe, page.slot}).at(position % options_.cache.page_size);
}

std::vector<std::optional<int32_t>> FakeRank::Execute(const StepPlan& sent) {
  const auto plan = ParseStepPlan(SerializeStepPlan(sent));
  EXPECT_TRUE(plan.ok()) << plan.status();
  Enter(*plan);
  CheckShape(*plan);
  std::vector<std::optional<int32_t>> sampled;
  for (const PlanRow& row : plan->rows) sampled.push_back(RunRow(row));
  return sampled;
}

void FakeRank::Enter(const StepPlan& plan) {
  for (const int32_t slot : plan.released_slots) {
    EXPECT_EQ(slots_.erase(slot), 1u) << "slot " << slot << " was not taken";
  }
  for (const SlotAdmission& admission : plan.admissions) {
    EXPECT_GE(admission.batch_slot, 0);
    EXPECT_LT(admission.batch_slot, options_.max_num_seqs);
    const auto [entry, is_new] = slots_.emplace(admission.batch_slot, Slot{});
    EXPECT_TRUE(is_new) << "slot " << admission.batch_slot << " is taken";
    EXPECT_LE(admission.prompt_length, std::ssize(admission.token_ids));
    entry->second.params = admission.params;
    entry->second.seed = admission.seed;
    entry->second.tokens = admission.token_ids;
  }
  for (const PageTableDelta& delta : plan.page_deltas) {
    const absl::Status status = ApplyPageTableDelta(delta, &slots_.at(delta.batch_slot).table);
    EXPECT_TRUE(status.ok()) << status;
  }
  uint64_t digest = 0;
  for (const auto& [index, slot] : slots_) digest += DigestPageTable(index, slot.table);
  EXPECT_EQ(plan.has_digest, options_.page_table_digest && options_.use_kv_cache);
  EXPECT_EQ(plan.page_table_digest, plan.has_digest ? digest : 0);

  // In any order, as one kernel may do it: no page is written twice, or read and written.
  std::set<std::pair<int32_t, int32_t>> targets;
  for (const PageOp& op : plan.page_ops) {
    EXPECT_EQ(op.source.stripe, op.target.stripe);
    EXPECT_TRUE(targets.insert({op.target.stripe, op.target.slot}).second);
    pages_.at({op.target.stripe, op.target.slot}) = pages_.at({op.source.stripe, op.source.slot});
  }
  for (const PageOp& op : plan.page_ops) {
    EXPECT_FALSE(targets.contains({op.source.stripe, op.source.slot})) << "a chain of copies";
  }
}

void FakeRank::CheckShape(const StepPlan& plan) const {
  EXPECT_FALSE(plan.rows.empty());
  EXPECT_LE(plan.NumTokens(), options_.max_num_batched_tokens);
  std::set<int32_t> with_row;
  bool prefill = false;
  for (const PlanRow& row : plan.rows) {
    EXPECT_TRUE(with_row.insert(row.batch_slot).second) << "two rows of one slot";
    ASSERT_TRUE(slots_.contains(row.batch_slot));
    const Slot& slot = slots_.at(row.batch_slot);
    const bool decodes = slot.num_computed > 0 && slot.num_computed + 1 == std::ssize(slot.tokens);
    EXPECT_TRUE(!decodes || !prefill || !options_.use_kv_cache) << "a decode after a prompt";
    prefill = prefill || !decodes;
    if (options_.prefill_chunk > 0 && options_.use_kv_cache) {
      EXPECT_LE(row.query_length, options_.prefill_chunk);
    }
  }
  // Nobody who only waits for one more token is left out.
  for (const auto& [index, slot] : slots_) {
    if (slot.num_computed + 1 == std::ssize(slot.tokens) && slot.num_computed > 0) {
      EXPECT_TRUE(with_row.contains(index)) << "decode of slot " << index << " was starved";
    }
  }
}

std::optional<int32_t> FakeRank::RunRow(const PlanRow& row) {
  Slot& slot = slots_.at(row.batch_slot);
  const int64_t end = row.first_position + row.query_length;
  EXPECT_GE(row.query_length, 1);
  EXPECT_LE(end, std::ssize(slot.tokens));
  EXPECT_EQ(row.sample, end == std::ssize(slot.tokens) && slot.params.max_tokens != 0);

  uint64_t state = kEmptyState;
  if (options_.use_kv_cache) {
    const int64_t window = options_.cache.window;
    const int64_t oldest = window == 0 ? 0 : std::max<int64_t>(0, row.first_position - window + 1);
    uint64_t expected = kEmptyState;
    for (int64_t position = 0; position < row.first_position; ++position) {
      expected = FoldToken(expected, slot.tokens[position]);
      if (position >= oldest) {
        EXPECT_EQ(StateAt(slot, position), expected) << "position " << position;
      }
    }
    state = row.first_position > oldest ? StateAt(slot, row.first_position - 1) : expected;
    for (int64_t position = row.first_position; position < end; ++position) {
      state = FoldToken(state, slot.tokens[position]);
      StateAt(slot, position) = state;
    }
  } else {
    EXPECT_EQ(row.first_position, 0);
    EXPECT_EQ(end, std::ssize(slot.tokens));
    for (const int32_t token : slot.tokens) state = FoldToken(state, token);
  }
  slot.num_computed = end;
  if (!row.sample) return std::nullopt;
  const int32_t token = NextToken(state, slot.seed);
  slot.tokens.push_back(token);
  return token;
}

}  // namespace heddle
