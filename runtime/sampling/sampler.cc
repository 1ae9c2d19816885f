#include "runtime/sampling/sampler.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/memory/memory.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

// What each rank offers of a filtered row; most filters keep less.
constexpr int64_t kCandidatesPerRank = 256;
// The first attempt on a whole row, before all of it is ranked.
constexpr int64_t kWholeRowCandidates = 4096;

std::span<const float> RowOf(ConstMatrixView logits, int64_t row) {
  return {logits.Row<float>(row), static_cast<size_t>(logits.cols)};
}

}  // namespace

Sampler::Sampler(LogitExchange exchange, RowContext context)
    : exchange_(std::move(exchange)),
      context_(std::move(context)),
      blocks_are_whole_(BlocksAreWhole(exchange_.shards())) {}

absl::StatusOr<std::unique_ptr<Sampler>> Sampler::Create(SamplerOptions options, Backend& backend,
                                                         Communicator& communicator) {
  ASSIGN_OR_RETURN(LogitExchange exchange,
                   LogitExchange::Create(std::move(options.vocab_shards), backend, communicator));
  CHECK_EQ(exchange.vocab_size(), options.vocab_size);
  RowContext context = {.num_sampled_ids = options.num_sampled_ids,
                        .eos_token_ids = std::move(options.eos_token_ids)};
  if (context.num_sampled_ids == 0) context.num_sampled_ids = options.vocab_size;
  return absl::WrapUnique(new Sampler(std::move(exchange), std::move(context)));
}

bool Sampler::RecordsMaySuffice(const RowNeeds& needs) const {
  return num_ranks() == 1 || (needs.top_logprobs <= kCandidatesPerRank &&
                              (blocks_are_whole_ || !(needs.sums || needs.raw_sums)));
}

SampledToken Sampler::ChooseFromWholeRow(std::span<const float> logits,
                                         const SequenceState& sequence) const {
  const Range all_ids = {0, exchange_.vocab_size()};
  for (const int64_t max_candidates : {kWholeRowCandidates, all_ids.end}) {
    const RowNeeds needs = NeedsOf(sequence.params(), max_candidates);
    std::optional<SampledToken> token =
        ChooseToken(FactsOf(logits, all_ids, sequence, needs, context_), sequence);
    if (token.has_value()) return *std::move(token);
  }
  LOG(FATAL) << "a fully ranked row is always decided";
  return {};
}

absl::StatusOr<std::vector<const std::byte*>> Sampler::GatherRecords(
    ConstMatrixView logits, std::span<const SequenceState* const> sequences,
    std::span<const std::optional<RowNeeds>> needs, Stream& stream) {
  const int64_t num_rows = logits.rows;
  std::vector<std::vector<std::byte>> own_records(num_rows);
  RETURN_IF_ERROR(exchange_.ForEachRow(
      num_rows,
      [&](int64_t row) {
        if (!needs[row].has_value()) return;
        const Range ids = exchange_.local_ids();
        const RowFacts facts =
            FactsOf(RowOf(logits, row), ids, *sequences[row], *needs[row], context_);
        AppendRecord(facts, *needs[row], ids, own_records[row]);
      },
      stream));
  std::vector<std::byte> own_bytes;
  for (const std::vector<std::byte>& record : own_records) {
    own_bytes.insert(own_bytes.end(), record.begin(), record.end());
  }

  std::vector<int64_t> offsets(num_rows * num_ranks());
  std::vector<int64_t> bytes_per_rank(num_ranks());
  int64_t offset = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const int64_t begin = offset;
    for (int64_t row = 0; row < num_rows; ++row) {
      offsets[row * num_ranks() + rank] = offset;
      if (needs[row].has_value()) offset += RecordBytes(*needs[row], exchange_.shards()[rank]);
    }
    bytes_per_rank[rank] = offset - begin;
  }
  ASSIGN_OR_RETURN(const std::span<const std::byte> gathered,
                   exchange_.Gather(std::move(own_bytes), bytes_per_rank, stream));
  std::vector<const std::byte*> records;
  records.reserve(offsets.size());
  for (const int64_t record_offset : offsets) records.push_back(gathered.data() + record_offset);
  return records;
}

absl::StatusOr<std::vector<SampledToken>> Sampler::Sample(
    ConstMatrixView logits, std::span<const SequenceState* const> sequences, Stream& stream) {
  const int64_t num_rows = static_cast<int64_t>(sequences.size());
  CHECK_EQ(logits.rows, num_rows);
  ASSIGN_OR_RETURN(logits, exchange_.ToHost(logits, stream));

  std::vector<std::optional<RowNeeds>> needs(num_rows);  // unset: the row is needed as a whole
  for (int64_t row = 0; row < num_rows; ++row) {
    const RowNeeds row_needs = NeedsOf(sequences[row]->params(), kCandidatesPerRank);
    if (RecordsMaySuffice(row_needs)) needs[row] = row_needs;
  }
  ASSIGN_OR_RETURN(const std::vector<const std::byte*> records,
                   GatherRecords(logits, sequences, needs, stream));
  // From here on all ranks compute the same from the same numbers.
  std::vector<std::optional<SampledToken>> tokens(num_rows);
  RETURN_IF_ERROR(exchange_.ForEachRow(
      num_rows,
      [&](int64_t row) {
        if (!needs[row].has_value()) return;
        const std::span of_row = std::span(records).subspan(row * num_ranks(), num_ranks());
        tokens[row] =
            ChooseToken(MergeRecords(of_row, exchange_.shards(), *needs[row]), *sequences[row]);
      },
      stream));

  std::vector<int64_t> open_rows;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (!tokens[row].has_value()) open_rows.push_back(row);
  }
  for (std::span<const int64_t> rest = open_rows; !rest.empty();) {
    const std::span<const int64_t> rows =
        rest.first(std::min<size_t>(rest.size(), LogitExchange::kMaxWholeRows));
    rest = rest.subspan(rows.size());
    ASSIGN_OR_RETURN(const ConstMatrixView whole, exchange_.GatherRows(logits, rows, stream));
    RETURN_IF_ERROR(exchange_.ForEachRow(
        whole.rows,
        [&](int64_t i) {
          tokens[rows[i]] = ChooseFromWholeRow(RowOf(whole, i), *sequences[rows[i]]);
        },
        stream));
  }

  std::vector<SampledToken> result;
  result.reserve(tokens.size());
  for (std::optional<SampledToken>& token : tokens) result.push_back(*std::move(token));
  return result;
}

}  // namespace heddle
