#include "runtime/sampling/sampling_params.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

constexpr int64_t kVocabSize = 259;

absl::Status Validate(const std::function<void(SamplingParams&)>& change) {
  SamplingParams params;
  change(params);
  return ValidateSamplingParams(params, kVocabSize);
}

TEST(SamplingParams, DefaultsAndTheEdgesOfEachRangeAreLegal) {
  const std::function<void(SamplingParams&)> changes[] = {
      [](SamplingParams&) {},
      [](SamplingParams& p) { p.max_tokens.reset(); },
      [](SamplingParams& p) { p.max_tokens = 0; },
      [](SamplingParams& p) { p.min_tokens = 16; },
      [](SamplingParams& p) { p.temperature = 0.0; },
      [](SamplingParams& p) { p.temperature = 1e-300; },
      [](SamplingParams& p) { p.temperature = 1e300; },
      [](SamplingParams& p) { p.top_p = 0.0; },
      [](SamplingParams& p) { p.top_k = -1; },
      [](SamplingParams& p) { p.top_k = 1000000; },
      [](SamplingParams& p) { p.min_p = 1.0; },
      [](SamplingParams& p) { p.repetition_penalty = 1e-3; },
      [](SamplingParams& p) { p.presence_penalty = -2.0; },
      [](SamplingParams& p) { p.frequency_penalty = 2.0; },
      [](SamplingParams& p) { p.logprobs = 0; },
      [](SamplingParams& p) { p.logprobs = 20; },
      [](SamplingParams& p) { p.logprobs = kVocabSize; },
      [](SamplingParams& p) {
        p.stop_token_ids = {0, 258};
      },
      [](SamplingParams& p) {
        p.stop = {"\n", "User:"};
      },
  };
  for (const auto& change : changes) EXPECT_TRUE(Validate(change).ok()) << Validate(change);
}

TEST(SamplingParams, ErrorsNameFieldValueAndRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  struct Case {
    std::function<void(SamplingParams&)> change;
    std::string message;
  };
  const Case cases[] = {
      {[](SamplingParams& p) { p.temperature = -0.5; },
       "temperature is -0.5, must be a finite number of at least 0"},
      {[&](SamplingParams& p) { p.temperature = nan; }, "temperature is nan"},
      {[&](SamplingParams& p) { p.temperature = infinity; }, "temperature is inf"},
      {[](SamplingParams& p) { p.top_p = 1.01; }, "top_p is 1.01, must be in [0, 1]"},
      {[](SamplingParams& p) { p.top_p = -1e-9; }, "top_p is -1e-09"},
      {[&](SamplingParams& p) { p.top_p = nan; }, "top_p is nan"},
      {[](SamplingParams& p) { p.min_p = 2; }, "min_p is 2, must be in [0, 1]"},
      {[&](SamplingParams& p) { p.min_p = nan; }, "min_p is nan"},
      {[](SamplingParams& p) { p.top_k = -2; }, "top_k is -2, must be at least 1, or 0 or -1"},
      {[](SamplingParams& p) { p.repetition_penalty = 0; }, "repetition_penalty is 0"},
      {[&](SamplingParams& p) { p.repetition_penalty = infinity; }, "repetition_penalty is inf"},
      {[](SamplingParams& p) { p.presence_penalty = 2.5; },
       "presence_penalty is 2.5, must be in [-2, 2]"},
      {[&](SamplingParams& p) { p.frequency_penalty = nan; }, "frequency_penalty is nan"},
      {[](SamplingParams& p) { p.max_tokens = -1; }, "max_tokens is -1, must be at least 0"},
      {[](SamplingParams& p) { p.min_tokens = -1; }, "min_tokens is -1, must be at least 0"},
      {[](SamplingParams& p) { p.min_tokens = 17; },
       "min_tokens is 17, must be at most max_tokens, 16"},
      {[](SamplingParams& p) { p.n = 0; }, "n is 0, must be in [1, 16384]"},
      {[](SamplingParams& p) { p.logprobs = -2; }, "logprobs is -2"},
      {[](SamplingParams& p) { p.logprobs = 260; }, "logprobs is 260, must be in [0, 259]"},
      {[](SamplingParams& p) {
         p.stop = {"ok", ""};
       },
       "stop is an empty string"},
      {[](SamplingParams& p) { p.stop_token_ids = {259}; },
       "stop_token_ids is 259, must be in [0, 259)"},
      {[](SamplingParams& p) { p.stop_token_ids = {-1}; }, "stop_token_ids is -1"},
  };
  for (const Case& c : cases) {
    const absl::Status status = Validate(c.change);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(c.message));
  }
}

TEST(SamplingParams, EveryBadFieldIsReportedAtOnce) {
  const absl::Status status = Validate([](SamplingParams& p) {
    p.temperature = -1;
    p.top_k = -7;
    p.n = 0;
  });
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("temperature is -1"),
                             testing::HasSubstr("top_k is -7"), testing::HasSubstr("n is 0")));
}

TEST(SamplingParams, WhatCountsAsGreedy) {
  SamplingParams params;
  EXPECT_FALSE(params.IsGreedy());
  for (const double temperature : {0.0, 1e-8, 9e-6}) {
    params = {.temperature = temperature};
    EXPECT_TRUE(params.IsGreedy()) << temperature;
  }
  params = {.temperature = 1e-5};
  EXPECT_FALSE(params.IsGreedy());
  params = {.top_k = 1};
  EXPECT_TRUE(params.IsGreedy());
  params = {.top_p = 0.0};
  EXPECT_TRUE(params.IsGreedy());
  params = {.top_p = 1e-9};
  EXPECT_TRUE(params.IsGreedy());
}

}  // namespace
}  // namespace heddle
