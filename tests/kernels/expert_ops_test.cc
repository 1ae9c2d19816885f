// Dispatch of tokens to experts and the sum of what comes back, against naive references.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/cpu_device.h"

namespace heddle {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsNan;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kUntouched = -77;

struct Dispatch {
  std::vector<int32_t> starts, tokens, entry_of;
};

ExpertDispatchArgs ArgsOf(const std::vector<int32_t>& ids, int64_t top_k, int64_t first_expert,
                          int64_t num_experts, Dispatch& dispatch) {
  dispatch.starts.assign(num_experts + 1, kUntouched);
  dispatch.tokens.assign(ids.size(), kUntouched);
  dispatch.entry_of.assign(ids.size(), kUntouched);
  return {.expert_ids = ids.data(),
          .num_tokens = top_k == 0 ? 0 : static_cast<int64_t>(ids.size()) / top_k,
          .top_k = top_k,
          .first_expert = first_expert,
          .num_experts = num_experts,
          .expert_starts = dispatch.starts.data(),
          .entry_tokens = dispatch.tokens.data(),
          .entry_of = dispatch.entry_of.data()};
}

Dispatch Deal(const std::vector<int32_t>& ids, int64_t top_k, int64_t first_expert,
              int64_t num_experts) {
  CpuDevice device;
  Dispatch dispatch;
  const ExpertDispatchArgs args = ArgsOf(ids, top_k, first_expert, num_experts, dispatch);
  const absl::Status status = device.kernels().expert_dispatch(args, device.stream());
  EXPECT_TRUE(status.ok()) << status;
  device.Synchronize();
  return dispatch;
}

TEST(ExpertDispatch, GroupsTokensByExpert) {
  const std::vector<int32_t> ids = {3, 1, 1, 0, 2, 1};  // of three tokens
  const Dispatch all = Deal(ids, 2, 0, 4);
  EXPECT_THAT(all.starts, ElementsAre(0, 1, 4, 5, 6));
  EXPECT_THAT(all.tokens, ElementsAre(1, 0, 1, 2, 2, 0));
  EXPECT_THAT(all.entry_of, ElementsAre(5, 1, 2, 0, 4, 3));
  const Dispatch some = Deal(ids, 2, 1, 2);
  EXPECT_THAT(some.starts, ElementsAre(0, 3, 4));
  EXPECT_THAT(some.tokens, ElementsAre(0, 1, 2, 2, kUntouched, kUntouched));
  EXPECT_THAT(some.entry_of, ElementsAre(-1, 0, 1, -1, 3, 2));
}

// Experts that the ranks do not divide: each choice has an entry on one rank, and on no other.
TEST(ExpertDispatch, EightExpertsOnThreeRanks) {
  std::mt19937 random(1);
  constexpr int64_t kTokens = 50, kTopK = 3;
  std::vector<int32_t> ids;
  for (int64_t token = 0; token < kTokens; ++token) {
    const auto first = static_cast<int32_t>(random() % 8);
    for (int32_t j = 0; j < kTopK; ++j) ids.push_back((first + 3 * j) % 8);
  }
  std::vector<int> holders(ids.size());
  const std::vector<std::pair<int64_t, int64_t>> ranks = {{0, 3}, {3, 6}, {6, 8}};
  for (const auto& [begin, end] : ranks) {
    const Dispatch dispatch = Deal(ids, kTopK, begin, end - begin);
    EXPECT_EQ(dispatch.starts[0], 0);
    for (int64_t e = 0; e < end - begin; ++e) {
      for (int32_t i = dispatch.starts[e]; i < dispatch.starts[e + 1]; ++i) {
        ASSERT_TRUE(i == dispatch.starts[e] || dispatch.tokens[i] > dispatch.tokens[i - 1]);
      }
    }
    for (size_t choice = 0; choice < ids.size(); ++choice) {
      const int32_t entry = dispatch.entry_of[choice];
      if (entry < 0) {
        EXPECT_EQ(entry, -1);
        continue;
      }
      ++holders[choice];
      EXPECT_EQ(dispatch.tokens[entry], static_cast<int32_t>(choice / kTopK));
      const int64_t expert = ids[choice] - begin;
      EXPECT_GE(entry, dispatch.starts[expert]);
      EXPECT_LT(entry, dispatch.starts[expert + 1]);
    }
  }
  EXPECT_THAT(holders, Each(1));
}

TEST(ExpertDispatch, NothingToDispatchIsLegal) {
  EXPECT_THAT(Deal({}, 2, 0, 3).starts, ElementsAre(0, 0, 0, 0));
  const Dispatch without_experts = Deal({0, 1}, 2, 0, 0);
  EXPECT_THAT(without_experts.starts, ElementsAre(0));
  EXPECT_THAT(without_experts.entry_of, ElementsAre(-1, -1));
}

TEST(ExpertDispatch, RefusesArgumentsByName) {
  CpuDevice device;
  const std::vector<int32_t> ids = {0, 1};
  const auto error = [&](auto spoil) {
    Dispatch dispatch;
    ExpertDispatchArgs args = ArgsOf(ids, 2, 0, 2, dispatch);
    spoil(args);
    return std::string(device.kernels().expert_dispatch(args, device.stream()).message());
  };
  using Args = ExpertDispatchArgs;
  EXPECT_EQ(error([](Args&) {}), "");
  EXPECT_THAT(error([](Args& args) { args.num_tokens = -1; }), HasSubstr("top 2 of -1 tokens"));
  EXPECT_THAT(error([](Args& args) { args.num_tokens = int64_t{1} << 31; }), HasSubstr("top 2 of"));
  EXPECT_THAT(error([](Args& args) { args.num_experts = -1; }), HasSubstr("-1 experts from 0"));
  EXPECT_THAT(error([](Args& args) { args.first_expert = -1; }), HasSubstr("2 experts from -1"));
  EXPECT_THAT(error([](Args& args) { args.expert_ids = nullptr; }),
              HasSubstr("expert_ids is null"));
  EXPECT_THAT(error([](Args& args) { args.expert_starts = nullptr; }),
              HasSubstr("expert_dispatch: expert_starts is null"));
  EXPECT_THAT(error([](Args& args) { args.entry_tokens = nullptr; }),
              HasSubstr("entry_tokens is null"));
  EXPECT_THAT(error([](Args& args) { args.entry_of = nullptr; }), HasSubstr("entry_of is null"));
}

TEST(ExpertCombine, MatchesDoublePrecision) {
  std::mt19937 random(2);
  for (const int64_t tokens : {0, 1, 2, 65}) {
    for (const int64_t top_k : {0, 1, 6}) {
      for (const int64_t width : {0, 1, 7, 16, 33, 576}) {
        for (const bool add : {false, true}) {
          SCOPED_TRACE(absl::StrCat(top_k, " of ", tokens, " tokens, width ", width, " add ", add));
          CpuDevice device(2);
          const int64_t entries = tokens * top_k, y_stride = width + 2, out_stride = width + 3;
          // Entries that no choice has must not be read.
          std::vector<float> y(entries * y_stride, kNan);
          std::vector<int32_t> entry_of(entries, -1);
          for (int64_t choice = 0; choice < entries; ++choice) {
            if (random() % 3 == 0) continue;
            entry_of[choice] = static_cast<int32_t>((choice * 7 + 3) % entries);
            const std::vector<float> row = RandomFloats(width, random);
            std::copy(row.begin(), row.end(), &y[entry_of[choice] * y_stride]);
          }
          const std::vector<float> weights = RandomFloats(entries, random);
          const std::vector<float> before = RandomFloats(tokens * out_stride, random);
          std::vector<float> out = before;
          const ExpertCombineArgs args = {
              .y = {y.data(), DType::kFloat32, entries, width, y_stride},
              .entry_of = entry_of.data(),
              .weights = weights.data(),
              .top_k = top_k,
              .add = add,
              .out = {out.data(), DType::kFloat32, tokens, width, out_stride}};
          ASSERT_TRUE(device.kernels().expert_combine(args, device.stream()).ok());
          device.Synchronize();
          for (int64_t token = 0; token < tokens; ++token) {
            for (int64_t i = 0; i < out_stride; ++i) {
              const int64_t at = token * out_stride + i;
              if (i >= width) {
                ASSERT_EQ(out[at], before[at]) << "past the row";
                continue;
              }
              double sum = add ? before[at] : 0.0, scale = std::fabs(sum);
              for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
                if (entry_of[choice] < 0) continue;
                const double term =
                    static_cast<double>(weights[choice]) * y[entry_of[choice] * y_stride + i];
                sum += term;
                scale += std::fabs(term);
              }
              ASSERT_NEAR(out[at], sum, 1e-6 * scale);
            }
          }
        }
      }
    }
  }
}

// Choices are added one after the other, so that ranks with the same entries have the same bits.
TEST(ExpertCombine, SumsInTheOrderOfTheChoices) {
  CpuDevice device;
  const std::vector<float> y = {1e8f, 1.0f, -1e8f}, ones(3, 1.0f);
  const auto combine = [&](const std::vector<int32_t>& entry_of) {
    float out = kNan;
    EXPECT_TRUE(device.kernels()
                    .expert_combine({.y = FloatMatrix(y.data(), 3, 1),
                                     .entry_of = entry_of.data(),
                                     .weights = ones.data(),
                                     .top_k = 3,
                                     .out = FloatMatrix(&out, 1, 1)},
                                    device.stream())
                    .ok());
    device.Synchronize();
    return out;
  };
  EXPECT_EQ(combine({0, 1, 2}), 0.0f);
  EXPECT_EQ(combine({0, 2, 1}), 1.0f);
}

TEST(ExpertCombine, RefusesArgumentsByName) {
  CpuDevice device;
  float values[16] = {};
  const auto error = [&](auto spoil) {
    std::vector<int32_t> entry_of = {0, -1, 2, 3};
    ExpertCombineArgs args = {.y = FloatMatrix(values, 4, 3),
                              .entry_of = entry_of.data(),
                              .weights = values,
                              .top_k = 2,
                              .out = FloatMatrix(values, 2, 3)};
    spoil(args, entry_of);
    absl::Status status = device.kernels().expert_combine(args, device.stream());
    if (status.ok()) status = device.stream().Synchronize();
    return std::string(status.message());
  };
  using Args = ExpertCombineArgs;
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(error([](Args&, Ints&) {}), "");
  EXPECT_THAT(error([&](Args& args, Ints&) { args.out = FloatMatrix(values, 2, 2); }),
              HasSubstr("expert_combine: y is [4, 3], not [4, 2]"));
  EXPECT_THAT(error([](Args& args, Ints&) { args.top_k = -1; }), HasSubstr("top -1"));
  EXPECT_THAT(error([](Args& args, Ints&) { args.entry_of = nullptr; }),
              HasSubstr("entry_of is null"));
  EXPECT_THAT(error([](Args& args, Ints&) { args.weights = nullptr; }),
              HasSubstr("weights is null"));
  for (const int32_t bad : {-2, 4}) {
    EXPECT_THAT(error([bad](Args&, Ints& entry_of) { entry_of[3] = bad; }),
                HasSubstr(absl::StrCat("choice 3 asks for entry ", bad, " of 4")));
  }
}

// From the router's choice to the sum, nothing is read before the stream runs.
TEST(ExpertOps, ReadTheirInputsWhenTheStreamRuns) {
  CpuDevice device(1, CpuStreamMode::kDeferred);
  std::vector<int32_t> ids = {0, 0};
  Dispatch dispatch;
  ASSERT_TRUE(
      device.kernels().expert_dispatch(ArgsOf(ids, 1, 0, 2, dispatch), device.stream()).ok());
  std::vector<float> y = {kNan, kNan}, weights = {kNan, kNan}, out = {kNan, kNan};
  ASSERT_TRUE(device.kernels()
                  .expert_combine({.y = FloatMatrix(y.data(), 2, 1),
                                   .entry_of = dispatch.entry_of.data(),
                                   .weights = weights.data(),
                                   .top_k = 1,
                                   .out = FloatMatrix(out.data(), 2, 1)},
                                  device.stream())
                  .ok());
  ids = {1, 0};
  y = {3.0f, 5.0f};
  weights = {2.0f, 4.0f};
  EXPECT_THAT(dispatch.starts, Each(kUntouched));
  EXPECT_THAT(out, Each(IsNan()));
  device.Synchronize();
  EXPECT_THAT(dispatch.starts, ElementsAre(0, 1, 2));
  EXPECT_THAT(dispatch.tokens, ElementsAre(1, 0));
  EXPECT_THAT(out, ElementsAre(10.0f, 12.0f));
}

}  // namespace
}  // namespace heddle
