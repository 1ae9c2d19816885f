// The router against a naive reference in double precision, and the rules of its references.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/cpu_device.h"
#include "tests/kernels/exact_router.h"

namespace heddle {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::FloatNear;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Routing {
  std::vector<int32_t> ids;    // [tokens, top_k]
  std::vector<float> weights;  // [tokens, top_k]
};

RouterArgs ArgsOf(const RouterRules& rules, const std::vector<float>& logits, const float* bias,
                  Routing& routing) {
  const auto tokens = static_cast<int64_t>(logits.size()) / rules.experts;
  routing.ids.assign(tokens * rules.top_k, -1);
  routing.weights.assign(tokens * rules.top_k, kNan);
  return {.logits = FloatMatrix(logits.data(), tokens, rules.experts),
          .score = rules.score,
          .correction_bias = bias,
          .num_groups = rules.num_groups,
          .num_top_groups = rules.num_top_groups,
          .group_score = rules.group_score,
          .top_k = rules.top_k,
          .normalise_weights = rules.normalise,
          .scaling_factor = static_cast<float>(rules.factor),
          .expert_ids = routing.ids.data(),
          .expert_weights = routing.weights.data()};
}

Routing Route(const RouterRules& rules, const std::vector<float>& logits,
              const std::vector<float>& bias = {}, int num_threads = 1) {
  CpuDevice device(num_threads);
  Routing routing;
  const RouterArgs args = ArgsOf(rules, logits, bias.empty() ? nullptr : bias.data(), routing);
  const absl::Status status = device.kernels().router(args, device.stream());
  EXPECT_TRUE(status.ok()) << status;
  device.Synchronize();
  return routing;
}

const std::vector<RouterRules>& AllRules() {
  static const auto* const kRules = new std::vector<RouterRules>{
      {.experts = 1, .normalise = true},
      {.experts = 8, .top_k = 2, .normalise = true},    // Mixtral
      {.experts = 128, .top_k = 8, .normalise = true},  // Qwen3-MoE
      {.experts = 64, .top_k = 6},                      // DeepSeek-V2-Lite
      {.experts = 160, .top_k = 6, .num_groups = 8, .num_top_groups = 3, .factor = 16.0f},  // V2
      {.experts = 256,
       .top_k = 8,
       .score = RouterScore::kSigmoid,
       .num_groups = 8,
       .num_top_groups = 4,
       .group_score = GroupScore::kTopTwoSum,
       .normalise = true,
       .factor = 2.5f},  // DeepSeek-V3
      {.experts = 384,
       .top_k = 8,
       .score = RouterScore::kSigmoid,
       .normalise = true,
       .factor = 2.827f},  // Kimi-K2
      {.experts = 600,
       .top_k = 10,
       .num_groups = 3,
       .num_top_groups = 2,
       .group_score = GroupScore::kTopTwoSum},
      {.experts = 15,
       .top_k = 10,
       .score = RouterScore::kSigmoid,
       .num_groups = 3,
       .num_top_groups = 2},  // every expert of the chosen groups
      {.experts = 7, .top_k = 3, .num_groups = 7, .num_top_groups = 5, .normalise = true},
      {.experts = 9, .top_k = 9, .num_groups = 3, .num_top_groups = 3, .factor = 0.5f},
  };
  return *kRules;
}

std::string Name(const RouterRules& rules) {
  return absl::StrCat(rules.top_k, " of ", rules.experts, ", ", rules.num_top_groups, " of ",
                      rules.num_groups, " groups");
}

TEST(Router, AgreesWithDoublePrecision) {
  std::mt19937 random(1);
  constexpr int64_t kTokens = 70;
  for (const RouterRules& rules : AllRules()) {
    for (const bool biased : {false, true}) {
      SCOPED_TRACE(absl::StrCat(Name(rules), biased ? ", biased" : ""));
      const std::vector<float> logits = RandomFloats(kTokens * rules.experts, random, 2.0f);
      const std::vector<float> bias =
          biased ? RandomFloats(rules.experts, random, 0.2f) : std::vector<float>();
      const Routing routing = Route(rules, logits, bias, 2);
      int64_t compared = 0;
      for (int64_t token = 0; token < kTokens; ++token) {
        const ExactRouting exact = RouteExactly(rules, &logits[token * rules.experts], bias);
        if (exact.margin < 1e-6) continue;  // rounding may decide
        ++compared;
        for (int64_t j = 0; j < rules.top_k; ++j) {
          ASSERT_EQ(routing.ids[token * rules.top_k + j], exact.ids[j]) << "token " << token;
          ASSERT_NEAR(routing.weights[token * rules.top_k + j], exact.weights[j],
                      2e-6 * exact.weights[j])
              << "token " << token;
        }
      }
      EXPECT_GE(compared, kTokens * 9 / 10);
    }
  }
}

TEST(Router, TiesGoToTheLowestId) {
  const std::vector<float> equal(12, 0.5f);
  EXPECT_THAT(Route({.experts = 12, .top_k = 3}, equal).ids, ElementsAre(0, 1, 2));
  EXPECT_THAT(Route({.experts = 12,
                     .top_k = 4,
                     .num_groups = 4,
                     .num_top_groups = 2,
                     .group_score = GroupScore::kTopTwoSum},
                    equal)
                  .ids,
              ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Route({.experts = 6, .top_k = 4}, {0, 1, 0, 1, 2, 1}).ids, ElementsAre(4, 1, 3, 5));
  // Also where the better group is not the first.
  EXPECT_THAT(
      Route({.experts = 6, .top_k = 2, .num_groups = 3, .num_top_groups = 2}, {1, 0, 2, 1, 0, 0})
          .ids,
      ElementsAre(2, 0));
}

// Zero in the place of minus infinity would let experts of other groups in before negative ones.
TEST(Router, ExpertsOfOtherGroupsAreNotChosenHoweverLowTheChosenGroupsFall) {
  const RouterRules rules = {.experts = 6,
                             .top_k = 3,
                             .score = RouterScore::kSigmoid,
                             .num_groups = 2,
                             .num_top_groups = 1};
  const std::vector<float> logits = {0, 0, 0, 0, 0, 0};  // scores of 0.5
  EXPECT_THAT(Route(rules, logits, {-2, -2, -2, -1, -9, -8}).ids, ElementsAre(3, 5, 4));
}

TEST(Router, GroupsAreChosenByTheirBestOrTheirTwoBest) {
  const std::vector<float> logits = {3, -9, -9, 2, 2, -9};
  RouterRules rules = {.experts = 6,
                       .top_k = 2,
                       .score = RouterScore::kSigmoid,
                       .num_groups = 2,
                       .num_top_groups = 1};
  EXPECT_THAT(Route(rules, logits).ids, ElementsAre(0, 1));
  rules.group_score = GroupScore::kTopTwoSum;
  EXPECT_THAT(Route(rules, logits).ids, ElementsAre(3, 4));
}

// The bias selects and does nothing else: a constant added to all of it changes nothing.
TEST(Router, ABiasSelectsOnly) {
  std::mt19937 random(2);
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    const RouterRules rules = {.experts = 32,
                               .top_k = 4,
                               .score = score,
                               .num_groups = 4,
                               .num_top_groups = 2,
                               .group_score = GroupScore::kTopTwoSum,
                               .normalise = true,
                               .factor = 2.5f};
    const std::vector<float> logits = RandomFloats(20 * rules.experts, random, 2.0f);
    std::vector<float> bias = RandomFloats(rules.experts, random, 0.3f);
    const Routing before = Route(rules, logits, bias);
    EXPECT_NE(before.ids, Route(rules, logits).ids);
    for (const float constant : {-8.0f, 0.25f, 8.0f}) {
      std::vector<float> shifted = bias;
      for (float& value : shifted) value += constant;
      const Routing after = Route(rules, logits, shifted);
      EXPECT_EQ(after.ids, before.ids) << constant;
      EXPECT_EQ(after.weights, before.weights) << constant;
    }
    // A bias that leaves no choice: weights are still those of the scores.
    std::fill(bias.begin(), bias.end(), 0.0f);
    for (const int32_t id : {9, 11, 17, 20}) bias[id] = 100.0f;
    const Routing forced = Route(rules, logits, bias);
    for (size_t token = 0; token < 20; ++token) {
      const std::vector<int32_t> ids(&forced.ids[token * 4], &forced.ids[token * 4] + 4);
      EXPECT_THAT(ids, testing::UnorderedElementsAre(9, 11, 17, 20));
      const ExactRouting exact = RouteExactly(rules, &logits[token * rules.experts], bias);
      for (int64_t j = 0; j < 4; ++j) {
        double expected = 0;
        for (int64_t i = 0; i < 4; ++i) {
          if (exact.ids[i] == ids[j]) expected = exact.weights[i];
        }
        EXPECT_NEAR(forced.weights[token * 4 + j], expected, 2e-6 * expected);
      }
    }
  }
}

TEST(Router, WeightsAreLinearInTheScalingFactor) {
  std::mt19937 random(3);
  for (RouterRules rules : AllRules()) {
    SCOPED_TRACE(Name(rules));
    const std::vector<float> logits = RandomFloats(9 * rules.experts, random, 2.0f);
    rules.factor = 1.0f;
    const Routing one = Route(rules, logits);
    rules.factor = 2.5f;
    const Routing scaled = Route(rules, logits);
    EXPECT_EQ(scaled.ids, one.ids);
    for (size_t i = 0; i < one.weights.size(); ++i) {
      EXPECT_EQ(scaled.weights[i], 2.5f * one.weights[i]);
    }
  }
}

TEST(Router, NormalisedWeightsSumToTheFactor) {
  std::mt19937 random(4);
  for (RouterRules rules : AllRules()) {
    SCOPED_TRACE(Name(rules));
    rules.normalise = true;
    const std::vector<float> logits = RandomFloats(9 * rules.experts, random, 2.0f);
    const Routing routing = Route(rules, logits);
    std::vector<float> sums(9);
    for (int64_t i = 0; i < 9 * rules.top_k; ++i) sums[i / rules.top_k] += routing.weights[i];
    EXPECT_THAT(sums, Each(FloatNear(rules.factor, 1e-6f * rules.factor)));
  }
  // Scores that vanish give zeros, not NaN.
  EXPECT_THAT(Route({.experts = 4, .top_k = 2, .score = RouterScore::kSigmoid, .normalise = true},
                    std::vector<float>(4, -200.0f))
                  .weights,
              Each(0.0f));
}

TEST(Router, ABadRowFailsAlone) {
  std::mt19937 random(5);
  for (const RouterRules& rules : AllRules()) {
    std::vector<float> logits = RandomFloats(3 * rules.experts, random);
    const Routing clean = Route(rules, logits);
    for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
      for (const int64_t first : {int64_t{0}, rules.experts - 1}) {
        SCOPED_TRACE(absl::StrCat(Name(rules), ", ", bad, " from ", first));
        std::vector<float> spoilt = logits;
        std::fill(&spoilt[rules.experts + first], &spoilt[2 * rules.experts - 1] + 1, bad);
        const Routing routing = Route(rules, spoilt);
        const int64_t k = rules.top_k;
        const std::set<int32_t> ids(&routing.ids[k], &routing.ids[k] + k);
        EXPECT_EQ(static_cast<int64_t>(ids.size()), k);
        EXPECT_GE(*ids.begin(), 0);
        EXPECT_LT(*ids.rbegin(), rules.experts);
        if (std::isnan(bad)) {
          EXPECT_TRUE(std::isnan(routing.weights[k]));
        }
        for (int64_t j = 0; j < 3 * k; ++j) {
          if (j >= k && j < 2 * k) continue;
          EXPECT_EQ(routing.ids[j], clean.ids[j]);
          EXPECT_EQ(routing.weights[j], clean.weights[j]);
        }
      }
    }
  }
}

TEST(Router, ARowsBitsDependOnNeitherBatchNorThreads) {
  std::mt19937 random(6);
  for (const RouterRules& rules : AllRules()) {
    SCOPED_TRACE(Name(rules));
    const int64_t tokens = 200, k = rules.top_k;
    const std::vector<float> logits = RandomFloats(tokens * rules.experts, random);
    const Routing all = Route(rules, logits, {}, 3);
    for (int64_t token = 0; token < tokens; token += 37) {
      const Routing alone =
          Route(rules, {&logits[token * rules.experts], &logits[(token + 1) * rules.experts]});
      EXPECT_EQ(std::memcmp(alone.ids.data(), &all.ids[token * k], k * sizeof(int32_t)), 0);
      EXPECT_EQ(std::memcmp(alone.weights.data(), &all.weights[token * k], k * sizeof(float)), 0);
    }
  }
}

TEST(Router, ReadsItsInputsWhenTheStreamRuns) {
  CpuDevice device(1, CpuStreamMode::kDeferred);
  std::vector<float> logits = {1, 0, 0};
  Routing routing;
  const RouterArgs args = ArgsOf({.experts = 3}, logits, nullptr, routing);
  ASSERT_TRUE(device.kernels().router(args, device.stream()).ok());
  logits = {0, 0, 1};
  EXPECT_THAT(routing.ids, ElementsAre(-1));
  device.Synchronize();
  EXPECT_THAT(routing.ids, ElementsAre(2));
}

TEST(Router, RefusesArgumentsByName) {
  CpuDevice device;
  const std::vector<float> logits(12);
  const auto error = [&](const RouterRules& rules, auto spoil) {
    Routing routing;
    RouterArgs args = ArgsOf(rules, logits, nullptr, routing);
    spoil(args);
    return std::string(device.kernels().router(args, device.stream()).message());
  };
  const auto keep = [](RouterArgs&) {};
  EXPECT_EQ(error({.experts = 12, .top_k = 12}, keep), "");
  EXPECT_THAT(error({.experts = 12, .top_k = 13}, keep), HasSubstr("router: top 13 of 1 groups"));
  EXPECT_THAT(error({.experts = 12, .top_k = 0}, keep), HasSubstr("router: top 0"));
  EXPECT_THAT(error({.experts = 12, .top_k = 4, .num_groups = 4}, keep),
              HasSubstr("router: top 4 of 1 groups of 3 experts"));
  EXPECT_THAT(error({.experts = 12, .num_groups = 5}, keep),
              HasSubstr("router: 1 of 5 groups of 12 experts"));
  EXPECT_THAT(error({.experts = 12, .num_groups = 2, .num_top_groups = 3}, keep),
              HasSubstr("router: 3 of 2 groups"));
  EXPECT_THAT(error({.experts = 12, .num_groups = 12, .group_score = GroupScore::kTopTwoSum}, keep),
              HasSubstr("groups of one"));
  EXPECT_THAT(error({.experts = 12, .factor = kNan}, keep), HasSubstr("scaling factor nan"));
  EXPECT_THAT(error({.experts = 12}, [](RouterArgs& args) { args.expert_ids = nullptr; }),
              HasSubstr("expert_ids is null"));
  EXPECT_THAT(error({.experts = 12}, [](RouterArgs& args) { args.expert_weights = nullptr; }),
              HasSubstr("expert_weights is null"));
}

}  // namespace
}  // namespace heddle
