#include "runtime/sampling/row_facts.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

bool IsFiltered(const SamplingParams& params) {
  return !params.IsGreedy() && (params.top_k > 0 || params.min_p > 0.0 || params.top_p < 1.0);
}

NoiseKey NoiseKeyOf(const SequenceState& sequence) {
  return {.seed = sequence.seed(), .position = sequence.position()};
}

// Slots of a record's lists.
int64_t ListSlots(int64_t wanted, Range ids) { return std::min(wanted, ids.size()); }

// Whether the slice has no candidates beside these.
bool IsComplete(const std::vector<Candidate>& list, int64_t wanted, Range ids) {
  const int64_t size = static_cast<int64_t>(list.size());
  return wanted == 0 || size < wanted || size == ids.size();
}

template <typename T>
void Put(const T& value, std::vector<std::byte>& out) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::byte* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(T));
}

template <typename T>
T Take(const std::byte*& in) {
  T value;
  std::memcpy(&value, in, sizeof(T));
  in += sizeof(T);
  return value;
}

void PutCandidates(const std::vector<Candidate>& list, int64_t slots, std::vector<std::byte>& out) {
  for (int64_t i = 0; i < slots; ++i) {
    Put(i < static_cast<int64_t>(list.size()) ? list[i] : Candidate(), out);
  }
}

// Drops the padding.
std::vector<Candidate> TakeCandidates(int64_t slots, const std::byte*& in) {
  std::vector<Candidate> list;
  for (int64_t i = 0; i < slots; ++i) {
    const Candidate candidate = Take<Candidate>(in);
    if (candidate.id >= 0) list.push_back(candidate);
  }
  return list;
}

void Append(const std::vector<Candidate>& list, std::vector<Candidate>& target) {
  target.insert(target.end(), list.begin(), list.end());
}

bool Before(const Candidate& a, const Candidate& b) { return a.Before(b); }

}  // namespace

RowNeeds NeedsOf(const SamplingParams& params, int64_t max_candidates) {
  RowNeeds needs;
  if (IsFiltered(params)) {
    needs.candidates = params.top_k > 0 ? std::min(params.top_k, max_candidates) : max_candidates;
    needs.sums = params.top_p < 1.0 && params.top_k <= 0 && params.min_p <= 0.0;
  }
  needs.top_logprobs = std::max<int64_t>(params.logprobs, 0);
  needs.raw_sums = params.logprobs >= 0;
  return needs;
}

RowFacts FactsOf(std::span<const float> logits, Range ids, const SequenceState& sequence,
                 const RowNeeds& needs, const RowContext& context) {
  RowFacts facts;
  const int32_t first_id = static_cast<int32_t>(ids.begin);
  const int64_t bad_index = FirstNotFinite(logits);
  if (bad_index >= 0) {
    facts.bad_id = first_id + static_cast<int32_t>(bad_index);
    facts.bad_logit = logits[bad_index];
    return facts;
  }

  std::vector<float> copy;
  std::span<const float> adjusted = logits;
  if (sequence.AdjustsLogits() || ids.end > context.num_sampled_ids) {
    copy.assign(logits.begin(), logits.end());
    sequence.AdjustLogits(copy, ids, context.eos_token_ids);
    const int64_t first_padding = std::clamp(context.num_sampled_ids, ids.begin, ids.end);
    std::fill(copy.begin() + (first_padding - ids.begin), copy.end(), kNegativeInfinity);
    adjusted = copy;
  }

  const SamplingParams& params = sequence.params();
  if (IsFiltered(params)) {
    facts.candidates = TopCandidates(adjusted, first_id, needs.candidates);
    for (Candidate& c : facts.candidates) c.raw_logit = logits[c.id - ids.begin];
    facts.complete = IsComplete(facts.candidates, needs.candidates, ids);
    if (needs.sums) facts.blocks = SumBlocks(adjusted, 1.0 / params.temperature);
  } else {
    facts.best = params.IsGreedy() ? Argmax(adjusted, first_id)
                                   : GumbelArgmax(adjusted, first_id, 1.0 / params.temperature,
                                                  NoiseKeyOf(sequence));
    if (facts.best.id >= 0) facts.best_raw_logit = logits[facts.best.id - ids.begin];
  }
  facts.top_logprobs = TopCandidates(logits, first_id, needs.top_logprobs);
  if (needs.raw_sums) facts.raw_blocks = SumBlocks(logits, 1.0);
  return facts;
}

int64_t RecordBytes(const RowNeeds& needs, Range ids) {
  const int64_t header = sizeof(int32_t) + sizeof(float) + sizeof(ScoredToken) + sizeof(float);
  const int64_t lists = ListSlots(needs.candidates, ids) + ListSlots(needs.top_logprobs, ids);
  const int64_t blocks = NumBlocks(ids.size()) * (int64_t{needs.sums} + int64_t{needs.raw_sums});
  return header + lists * static_cast<int64_t>(sizeof(Candidate)) +
         blocks * static_cast<int64_t>(sizeof(BlockSum));
}

void AppendRecord(const RowFacts& facts, const RowNeeds& needs, Range ids,
                  std::vector<std::byte>& out) {
  const size_t begin = out.size();
  Put(facts.bad_id, out);
  Put(facts.bad_logit, out);
  Put(facts.best, out);
  Put(facts.best_raw_logit, out);
  PutCandidates(facts.candidates, ListSlots(needs.candidates, ids), out);
  PutCandidates(facts.top_logprobs, ListSlots(needs.top_logprobs, ids), out);
  for (const BlockSum& block : facts.blocks) Put(block, out);
  for (const BlockSum& block : facts.raw_blocks) Put(block, out);
  out.resize(begin + RecordBytes(needs, ids));  // a bad row has no blocks
}

RowFacts MergeRecords(std::span<const std::byte* const> records, std::span<const Range> shards,
                      const RowNeeds& needs) {
  RowFacts merged;
  // Past the last candidate of a slice that has more to offer nobody knows which comes next.
  std::optional<Candidate> horizon;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const Range ids = shards[rank];
    const std::byte* in = records[rank];
    merged.bad_id = Take<int32_t>(in);
    merged.bad_logit = Take<float>(in);
    if (merged.bad_id >= 0) return merged;
    const ScoredToken best = Take<ScoredToken>(in);
    const float best_raw_logit = Take<float>(in);
    if (merged.best.YieldsTo(best)) {
      merged.best = best;
      merged.best_raw_logit = best_raw_logit;
    }
    const std::vector<Candidate> candidates = TakeCandidates(ListSlots(needs.candidates, ids), in);
    Append(candidates, merged.candidates);
    if (!IsComplete(candidates, needs.candidates, ids) &&
        (!horizon.has_value() || candidates.back().Before(*horizon))) {
      horizon = candidates.back();
    }
    Append(TakeCandidates(ListSlots(needs.top_logprobs, ids), in), merged.top_logprobs);
    const int64_t num_blocks = NumBlocks(ids.size());
    for (int64_t i = 0; needs.sums && i < num_blocks; ++i) {
      merged.blocks.push_back(Take<BlockSum>(in));
    }
    for (int64_t i = 0; needs.raw_sums && i < num_blocks; ++i) {
      merged.raw_blocks.push_back(Take<BlockSum>(in));
    }
  }
  std::sort(merged.top_logprobs.begin(), merged.top_logprobs.end(), Before);
  std::vector<Candidate>& head = merged.candidates;
  std::sort(head.begin(), head.end(), Before);
  if (horizon.has_value()) {
    head.erase(std::upper_bound(head.begin(), head.end(), *horizon, Before), head.end());
    merged.complete = false;
  }
  return merged;
}

std::optional<SampledToken> ChooseToken(const RowFacts& facts, const SequenceState& sequence) {
  const SamplingParams& params = sequence.params();
  SampledToken result;
  if (facts.bad_id >= 0) {
    result.status = absl::InternalError(absl::StrCat(
        "the model gave the logit ", facts.bad_logit, " for token id ", facts.bad_id,
        " at position ", sequence.position(), ": weights or activations are out of range"));
    return result;
  }
  ScoredToken best = facts.best;
  float raw_logit = facts.best_raw_logit;
  if (IsFiltered(params) && !facts.candidates.empty()) {
    const double inverse_temperature = 1.0 / params.temperature;
    const RankedRow row{
        .head = facts.candidates,
        .complete = facts.complete,
        .total = TotalOf(facts.blocks, facts.candidates[0].logit, inverse_temperature)};
    const std::optional<int64_t> num_kept = CountKept(row, params);
    if (!num_kept.has_value()) return std::nullopt;
    const std::span kept = std::span(row.head).first(*num_kept);
    best = GumbelArgmax(kept, inverse_temperature, NoiseKeyOf(sequence));
    raw_logit = std::find_if(kept.begin(), kept.end(), [&best](const Candidate& c) {
                  return c.id == best.id;
                })->raw_logit;
  }
  if (best.id < 0) {
    result.status = absl::InvalidArgumentError(
        absl::StrCat("no token may be sampled at position ", sequence.position(), ": min_tokens, ",
                     params.min_tokens, ", forbids all that the model has"));
    return result;
  }
  result.token_id = best.id;
  if (params.logprobs < 0) return result;
  const double log_sum_exp = LogSumExp(facts.raw_blocks);
  result.logprob = ReportedLogprob(raw_logit, log_sum_exp);
  for (const Candidate& c : facts.top_logprobs) {
    if (static_cast<int64_t>(result.top_logprobs.size()) == params.logprobs) break;
    result.top_logprobs.push_back({c.id, ReportedLogprob(c.logit, log_sum_exp)});
  }
  return result;
}

}  // namespace heddle
