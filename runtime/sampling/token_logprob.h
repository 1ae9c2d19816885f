// The log-probability of a token, as users see it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace heddle {

// What a log-probability below it is reported as: JSON has no infinity.
inline constexpr float kLogprobFloor = -9999.0f;

struct TokenLogprob {
  int32_t token_id = 0;
  // Natural, of the model's raw distribution: before penalties, temperature and filters.
  float logprob = 0.0f;
};

inline float ReportedLogprob(float raw_logit, double log_sum_exp) {
  return std::max(static_cast<float>(raw_logit - log_sum_exp), kLogprobFloor);
}

}  // namespace heddle
