#include "runtime/sampling/sampling_params.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace heddle {
namespace {

// More sequences of one prompt than any batch can hold.
constexpr int64_t kMaxSequences = 16384;

// Collects every field that is out of its range.
class Complaints {
 public:
  template <typename T>
  void Require(bool ok, absl::string_view field, T value, absl::string_view range) {
    if (!ok) list_.push_back(absl::StrCat(field, " is ", value, ", must be ", range));
  }

  absl::Status ToStatus() const {
    if (list_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrJoin(list_, "; "));
  }

 private:
  std::vector<std::string> list_;
};

}  // namespace

absl::Status ValidateSamplingParams(const SamplingParams& params, int64_t vocab_size) {
  Complaints complaints;
  // Comparisons are written so that NaN fails them.
  const double max = std::numeric_limits<double>::max();
  complaints.Require(params.temperature >= 0.0 && params.temperature <= max, "temperature",
                     params.temperature, "a finite number of at least 0");
  complaints.Require(params.top_p >= 0.0 && params.top_p <= 1.0, "top_p", params.top_p,
                     "in [0, 1] (0 is greedy)");
  complaints.Require(params.min_p >= 0.0 && params.min_p <= 1.0, "min_p", params.min_p,
                     "in [0, 1]");
  complaints.Require(params.top_k >= -1, "top_k", params.top_k,
                     "at least 1, or 0 or -1 for all tokens");
  complaints.Require(params.repetition_penalty > 0.0 && params.repetition_penalty <= max,
                     "repetition_penalty", params.repetition_penalty,
                     "a finite number above 0 (1 is none)");
  complaints.Require(params.presence_penalty >= -2.0 && params.presence_penalty <= 2.0,
                     "presence_penalty", params.presence_penalty, "in [-2, 2]");
  complaints.Require(params.frequency_penalty >= -2.0 && params.frequency_penalty <= 2.0,
                     "frequency_penalty", params.frequency_penalty, "in [-2, 2]");
  if (params.max_tokens.has_value()) {
    complaints.Require(*params.max_tokens >= 0, "max_tokens", *params.max_tokens, "at least 0");
    complaints.Require(params.min_tokens <= *params.max_tokens, "min_tokens", params.min_tokens,
                       absl::StrCat("at most max_tokens, ", *params.max_tokens));
  }
  complaints.Require(params.min_tokens >= 0, "min_tokens", params.min_tokens, "at least 0");
  complaints.Require(params.n >= 1 && params.n <= kMaxSequences, "n", params.n,
                     absl::StrCat("in [1, ", kMaxSequences, "]"));
  complaints.Require(params.logprobs >= -1 && params.logprobs <= vocab_size, "logprobs",
                     params.logprobs,
                     absl::StrCat("in [0, ", vocab_size, "], the vocabulary, or -1 for none"));
  for (const std::string& stop : params.stop) {
    complaints.Require(!stop.empty(), "stop", "an empty string", "a text that can occur");
  }
  for (const int32_t id : params.stop_token_ids) {
    complaints.Require(id >= 0 && id < vocab_size, "stop_token_ids", id,
                       absl::StrCat("in [0, ", vocab_size, ")"));
  }
  return complaints.ToStatus();
}

}  // namespace heddle
