#include "runtime/stripe_choice.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

std::string Stripes(int count) { return absl::StrCat(count, count == 1 ? " stripe" : " stripes"); }

std::string Milliseconds(double seconds) {
  const double ms = seconds * 1e3;
  return ms < 1000 ? absl::StrFormat("%.3g ms", ms) : absl::StrFormat("%.0f ms", ms);
}

struct Candidate {
  StripeOption option;
  bool holds_load = false;
  StepTime time;
};

std::string Explain(const std::vector<Candidate>& candidates, const Candidate& best,
                    const ExpectedLoad& load) {
  std::vector<std::string> times, too_small;
  for (const Candidate& one : candidates) {
    times.push_back(absl::StrCat(Milliseconds(one.time.total()), " with ", one.option.num_stripes));
    if (!one.holds_load) {
      too_small.push_back(
          absl::StrCat(Stripes(one.option.num_stripes), " ", one.option.capacity_tokens));
    }
  }
  std::string why = absl::StrCat(
      Stripes(best.option.num_stripes), " for ", load.max_num_seqs, " sequences of ",
      load.context_len, " tokens: a decode step is predicted to take ", absl::StrJoin(times, ", "),
      absl::StrFormat(" (of this %.0f %% communication)",
                      100 * best.time.communication / best.time.total()));
  if (!too_small.empty()) {
    absl::StrAppend(&why, "; of ", load.max_num_seqs * load.context_len, " tokens the cache holds ",
                    absl::StrJoin(too_small, ", "));
  }
  return why;
}

}  // namespace

absl::StatusOr<int64_t> ExpectedContext(int64_t expected_context_len, int64_t max_model_len) {
  const int64_t expected =
      expected_context_len > 0 ? expected_context_len : (max_model_len + 1) / 2;
  if (expected <= kLongestContext) return expected;
  return absl::InvalidArgumentError(
      absl::StrCat("--expected-context-len ", expected, ": expected at most ", kLongestContext));
}

absl::StatusOr<std::vector<StripeOption>> StripeOptionsOf(const ModelSpec& spec,
                                                          const WeightSource& weights,
                                                          ShardLayoutOptions layout,
                                                          double memory_bytes) {
  layout.memory_bytes.reset();
  std::vector<StripeOption> options;
  for (int stripes = 1; stripes <= layout.num_ranks; ++stripes) {
    if (layout.num_ranks % stripes != 0) continue;
    layout.num_stripes = stripes;
    ASSIGN_OR_RETURN(const ShardLayout ranks, BuildShardLayout(spec, weights, layout));
    options.push_back(
        {.num_stripes = stripes, .capacity_tokens = CapacityTokens(ranks, memory_bytes)});
  }
  return options;
}

StepTime PredictOption(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                       const StripeOption& option, const ExpectedLoad& load) {
  DeviceFigures figures = device;
  if (option.exchange.has_value()) figures.all_gather = figures.all_to_all = *option.exchange;
  const Placement placement = {.num_ranks = num_ranks, .num_stripes = option.num_stripes};
  return PredictStep(model, figures, placement, load.max_num_seqs, load.context_len);
}

StripeChoice ChooseStripes(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                           std::span<const StripeOption> options, const ExpectedLoad& load) {
  CHECK(!options.empty());
  std::vector<Candidate> candidates;
  int64_t most_tokens = 0;
  bool any_holds_load = false;
  for (const StripeOption& option : options) {
    const bool holds_load = option.capacity_tokens / load.context_len >= load.max_num_seqs;
    candidates.push_back({.option = option,
                          .holds_load = holds_load,
                          .time = PredictOption(model, device, num_ranks, option, load)});
    most_tokens = std::max(most_tokens, option.capacity_tokens);
    any_holds_load |= holds_load;
  }
  const auto has_room = [&](const Candidate& one) {
    return any_holds_load ? one.holds_load
                          : static_cast<double>(one.option.capacity_tokens) >=
                                kSameCapacity * static_cast<double>(most_tokens);
  };
  double least_time = std::numeric_limits<double>::infinity();
  for (const Candidate& one : candidates) {
    if (has_room(one)) least_time = std::min(least_time, one.time.total());
  }
  const Candidate& best =
      *std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& one) {
        return has_room(one) && one.time.total() <= kSameTime * least_time;
      });
  return {.num_stripes = best.option.num_stripes, .why = Explain(candidates, best, load)};
}

}  // namespace heddle
