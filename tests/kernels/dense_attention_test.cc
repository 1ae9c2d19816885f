// Attention without a cache, against double precision.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/attention/gqa_attention.h"
#include "tests/kernels/cpu_device.h"

namespace heddle {
namespace {

using testing::HasSubstr;

struct Batch {
  int64_t query_heads = 4, kv_heads = 2, dim = 16;
  std::vector<int32_t> query_starts = {};
  int64_t window = 0;
  std::vector<float> q = {}, k = {}, v = {};

  void Fill(std::mt19937& random) {
    const int64_t tokens = query_starts.back();
    q = RandomFloats(tokens * query_heads * dim, random);
    k = RandomFloats(tokens * kv_heads * dim, random);
    v = RandomFloats(tokens * kv_heads * dim, random);
  }
};

absl::StatusOr<std::vector<float>> Attend(const Batch& batch, int num_threads = 1) {
  CpuDevice device(num_threads);
  const int64_t tokens = batch.query_starts.empty() ? 0 : batch.query_starts.back();
  const int64_t q_width = batch.query_heads * batch.dim, kv_width = batch.kv_heads * batch.dim;
  // Rows apart, NaN between them.
  const auto upload = [&](const std::vector<float>& values, int64_t width) {
    std::vector<float> spread(tokens * (width + 5), std::numeric_limits<float>::quiet_NaN());
    for (int64_t token = 0; token < tokens; ++token) {
      std::copy_n(values.begin() + token * width, width, spread.begin() + token * (width + 5));
    }
    return ConstMatrixView(device.Upload(spread), DType::kFloat32, tokens, width, width + 5);
  };
  std::vector<float> out(tokens * q_width, std::numeric_limits<float>::quiet_NaN());
  DenseAttentionArgs args;
  args.q = upload(batch.q, q_width);
  args.k = upload(batch.k, kv_width);
  args.v = upload(batch.v, kv_width);
  args.num_query_heads = batch.query_heads;
  args.num_kv_heads = batch.kv_heads;
  args.head_dim = batch.dim;
  args.num_sequences = std::max<int64_t>(0, static_cast<int64_t>(batch.query_starts.size()) - 1);
  args.query_starts = device.Upload(batch.query_starts);
  args.scale = 0.3f;
  args.window = batch.window;
  args.out = FloatMatrix(out.data(), tokens, q_width);
  absl::Status status = device.kernels().dense_attention(args, device.stream());
  if (status.ok()) status = device.stream().Synchronize();
  if (!status.ok()) return status;
  return out;
}

void ExpectMatchesDoublePrecision(const Batch& batch, const std::vector<float>& out) {
  const int64_t group = batch.query_heads / std::max<int64_t>(1, batch.kv_heads);
  for (size_t s = 0; s + 1 < batch.query_starts.size(); ++s) {
    for (int64_t token = batch.query_starts[s]; token < batch.query_starts[s + 1]; ++token) {
      for (int64_t head = 0; head < batch.query_heads; ++head) {
        int64_t begin = batch.query_starts[s];
        if (batch.window > 0) begin = std::max(begin, token - batch.window + 1);
        std::vector<double> expected(batch.dim, 0.0);
        double sum = 0;
        for (int64_t key = begin; key <= token; ++key) {
          double score = 0;
          const int64_t row = (key * batch.kv_heads + head / group) * batch.dim;
          for (int64_t i = 0; i < batch.dim; ++i) {
            score +=
                static_cast<double>(batch.q[(token * batch.query_heads + head) * batch.dim + i]) *
                batch.k[row + i];
          }
          const double weight = std::exp(score * static_cast<double>(0.3f));
          sum += weight;
          for (int64_t i = 0; i < batch.dim; ++i) expected[i] += weight * batch.v[row + i];
        }
        for (int64_t i = 0; i < batch.dim; ++i) {
          ASSERT_NEAR(out[(token * batch.query_heads + head) * batch.dim + i], expected[i] / sum,
                      1e-5)
              << "token " << token << " head " << head << " element " << i;
        }
      }
    }
  }
}

TEST(DenseAttention, MatchesDoublePrecision) {
  std::mt19937 random(1);
  struct Shape {
    int64_t query_heads, kv_heads, dim;
  };
  for (const auto& [query_heads, kv_heads, dim] :
       {Shape{1, 1, 1}, {4, 2, 16}, {9, 3, 64}, {7, 1, 33}, {3, 3, 80}}) {
    for (const int64_t window : {0, 1, 7}) {
      for (const std::vector<int32_t>& starts :
           {std::vector<int32_t>{0, 1}, {0, 40}, {0, 3, 3, 70, 71}}) {
        SCOPED_TRACE(absl::StrCat(query_heads, "/", kv_heads, "x", dim, " window ", window));
        Batch batch{query_heads, kv_heads, dim, starts, window, {}, {}, {}};
        batch.Fill(random);
        const auto out = Attend(batch, 2);
        ASSERT_TRUE(out.ok()) << out.status();
        ExpectMatchesDoublePrecision(batch, *out);
      }
    }
  }
}

TEST(DenseAttention, BitsDoNotDependOnThreadsOrLaterTokens) {
  std::mt19937 random(2);
  Batch batch{.query_starts = {0, 60}};
  batch.Fill(random);
  const auto whole = *Attend(batch);
  EXPECT_EQ(*Attend(batch, 3), whole);
  batch.query_starts = {0, 31};
  const auto prefix = *Attend(batch, 2);
  EXPECT_TRUE(std::equal(prefix.begin(), prefix.end(), whole.begin()));
}

TEST(DenseAttention, ShardsWithoutHeadsOrTokensDoNothing) {
  EXPECT_TRUE(Attend({.query_heads = 0, .kv_heads = 0, .query_starts = {0, 3}}).ok());
  EXPECT_TRUE(Attend({.query_starts = {0}}).ok());
  EXPECT_TRUE(Attend({}).ok());
}

TEST(DenseAttention, RefusesArgumentsByName) {
  std::mt19937 random(3);
  const auto error = [&](Batch batch) {
    batch.Fill(random);
    return std::string(Attend(batch).status().message());
  };
  EXPECT_THAT(error({.query_heads = 3, .query_starts = {0, 4}}),
              HasSubstr("dense_attention: 3 query heads are not a multiple of 2 KV heads"));
  EXPECT_THAT(error({.query_starts = {0, 4}, .window = -2}), HasSubstr("window -2 is negative"));
  EXPECT_THAT(error({.query_starts = {0, 5, 4}}), HasSubstr("tokens 0 to 5 of 4"));
  EXPECT_THAT(error({.query_starts = {1, 4}}), HasSubstr("tokens 1 to 4 of 4, after token 0"));
}

}  // namespace
}  // namespace heddle
