#include "kernels/attention/merge_partials.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/cpu_device.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(MergePartials, MatchesDoublePrecision) {
  std::mt19937 random(1);
  constexpr int64_t kTokens = 40, kHeads = 3, kDim = 21;
  for (const int64_t parts : {0, 1, 2, 5}) {
    CpuDevice device(2, CpuStreamMode::kDeferred);
    std::vector<float> partials = RandomFloats(parts * kTokens * kHeads * kDim, random);
    std::vector<float> sums = RandomFloats(parts * kTokens * kHeads, random, 20.0f);
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t row = 0; row < kTokens * kHeads; ++row) {
        // Row 0 has no part at all, others lack some; what is not there may be anything.
        if (row != 0 && random() % 4 != 0) continue;
        sums[part * kTokens * kHeads + row] = -kInfinity;
        std::fill_n(&partials[(part * kTokens * kHeads + row) * kDim], kDim, kNan);
      }
    }
    // Parts are [tokens, heads, dim], their sums [heads, tokens] as mla_decode writes them.
    std::vector<float> sums_by_head(sums.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      const size_t part = i / (kTokens * kHeads), row = i % (kTokens * kHeads);
      sums_by_head[part * kTokens * kHeads + row % kHeads * kTokens + row / kHeads] = sums[i];
    }
    std::vector<float> out(kTokens * kHeads * (kDim + 2), kNan), sum(kTokens * kHeads, kNan);
    const HeadsView out_view = {out.data(), kTokens, kHeads, kDim, kHeads * (kDim + 2), kDim + 2};
    const float* parts_data = device.Upload(partials);
    const float* sums_data = device.Upload(sums_by_head);
    const MergePartialsArgs args = {.partials = TokenMajor(parts_data, kTokens, kHeads, kDim),
                                    .partial_stride = kTokens * kHeads * kDim,
                                    .log_sum_exps = HeadMajor(sums_data, kTokens, kHeads, 1),
                                    .log_sum_exp_stride = kTokens * kHeads,
                                    .num_parts = parts,
                                    .out = out_view,
                                    .log_sum_exp = TokenMajor(sum.data(), kTokens, kHeads, 1)};
    ASSERT_TRUE(device.kernels().merge_partials(args, device.stream()).ok());
    device.Synchronize();
    for (int64_t row = 0; row < kTokens * kHeads; ++row) {
      double maximum = -kInfinity, total = 0;
      std::vector<double> expected(kDim, 0.0);
      for (int64_t part = 0; part < parts; ++part) {
        maximum = std::max<double>(maximum, sums[part * kTokens * kHeads + row]);
      }
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t at = part * kTokens * kHeads + row;
        if (sums[at] == -kInfinity) continue;
        const double share = std::exp(sums[at] - maximum);
        total += share;
        for (int64_t i = 0; i < kDim; ++i) {
          expected[i] += share * static_cast<double>(partials[at * kDim + i]);
        }
      }
      for (int64_t i = 0; i < kDim; ++i) {
        ASSERT_NEAR(out_view.At(row / kHeads, row % kHeads)[i],
                    total > 0 ? expected[i] / total : 0.0, 1e-6);
      }
      if (total > 0) {
        ASSERT_NEAR(sum[row], maximum + std::log(total), 1e-5);
      } else {
        ASSERT_EQ(sum[row], -kInfinity);
      }
    }
  }
}

TEST(MergePartials, RefusesArgumentsByName) {
  float memory[64] = {};
  const float* in = memory;
  const MergePartialsArgs good = {.partials = TokenMajor(in, 1, 2, 4),
                                  .partial_stride = 8,
                                  .log_sum_exps = TokenMajor(in, 1, 2, 1),
                                  .log_sum_exp_stride = 2,
                                  .num_parts = 2,
                                  .out = TokenMajor(memory + 32, 1, 2, 4),
                                  .log_sum_exp = {}};
  const auto error = [&](auto spoil) {
    MergePartialsArgs args = good;
    spoil(args);
    return std::string(ValidateMergePartials(args).message());
  };
  EXPECT_EQ(error([](MergePartialsArgs&) {}), "");
  EXPECT_THAT(error([](MergePartialsArgs& a) { a.num_parts = -1; }),
              HasSubstr("merge_partials: -1 parts"));
  EXPECT_THAT(error([](MergePartialsArgs& a) { a.partials.dim = 3; }),
              HasSubstr("partials is [1, 2, 3], not [1, 2, 4]"));
  EXPECT_THAT(error([](MergePartialsArgs& a) { a.log_sum_exps.tokens = 2; }),
              HasSubstr("log_sum_exps"));
  EXPECT_THAT(error([](MergePartialsArgs& a) { a.out.data = nullptr; }), HasSubstr("out is null"));
}

}  // namespace
}  // namespace heddle
