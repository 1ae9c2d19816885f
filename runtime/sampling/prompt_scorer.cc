#include "runtime/sampling/prompt_scorer.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/memory/memory.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/sampling/row_sums.h"
#include "runtime/sampling/token_logprob.h"

namespace heddle {
namespace {

float LogprobOf(std::span<const float> logits, int32_t target) {
  if (target < 0) return 0.0f;
  if (FirstNotFinite(logits) >= 0) return std::numeric_limits<float>::quiet_NaN();
  return ReportedLogprob(logits[target], LogSumExp(SumBlocks(logits, 1.0)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PromptScorer>> PromptScorer::Create(std::vector<Range> vocab_shards,
                                                                   Backend& backend,
                                                                   Communicator& communicator) {
  ASSIGN_OR_RETURN(LogitExchange exchange,
                   LogitExchange::Create(std::move(vocab_shards), backend, communicator));
  return absl::WrapUnique(new PromptScorer(std::move(exchange), communicator.rank() == 0));
}

absl::StatusOr<ScoredRows> PromptScorer::Score(ConstMatrixView logits,
                                               std::span<const int32_t> targets, bool want_logits,
                                               Stream& stream) {
  CHECK_EQ(logits.rows, static_cast<int64_t>(targets.size()));
  ASSIGN_OR_RETURN(logits, exchange_.ToHost(logits, stream));
  ScoredRows scored;
  std::vector<int64_t> rows(LogitExchange::kMaxWholeRows);
  for (int64_t begin = 0; begin < logits.rows; begin += LogitExchange::kMaxWholeRows) {
    rows.resize(std::min(LogitExchange::kMaxWholeRows, logits.rows - begin));
    std::iota(rows.begin(), rows.end(), begin);
    ASSIGN_OR_RETURN(const ConstMatrixView whole, exchange_.GatherRows(logits, rows, stream));
    if (!is_root_) continue;
    scored.logprobs.resize(begin + whole.rows);
    RETURN_IF_ERROR(exchange_.ForEachRow(
        whole.rows,
        [&](int64_t i) {
          const std::span row(whole.Row<float>(i), static_cast<size_t>(whole.cols));
          scored.logprobs[begin + i] = LogprobOf(row, targets[begin + i]);
        },
        stream));
    if (want_logits) {
      const float* first = whole.Row<float>(0);
      scored.logits.insert(scored.logits.end(), first, first + whole.rows * whole.cols);
    }
  }
  return scored;
}

}  // namespace heddle
