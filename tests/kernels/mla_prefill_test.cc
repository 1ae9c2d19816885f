#include "kernels/attention/mla_prefill.h"

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
#include "kernels/attention/mla_decode.h"
#include "tests/kernels/every_target.h"
#include "tests/kernels/test_weight.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int64_t heads = 4;
  int64_t nope = 8;
  int64_t rope = 4;
  int64_t v = 8;

  int64_t key() const { return nope + rope; }
  int64_t expanded() const { return nope + v; }
};

// The whole history of one sequence, expanded.
struct History {
  History(const Shape& shape, int64_t num_tokens, std::mt19937& random)
      : length(num_tokens),
        q(RandomFloats(num_tokens * shape.heads * shape.key(), random)),
        expanded(RandomFloats(num_tokens * shape.heads * shape.expanded(), random)),
        k_rope(RandomFloats(num_tokens * shape.rope, random)) {}
  int64_t length;
  std::vector<float> q;         // [tokens, heads, nope + rope]
  std::vector<float> expanded;  // [tokens, heads, nope + v]
  std::vector<float> k_rope;    // [tokens, rope]
};

// Queries [first, end) of a history.
struct Slice {
  const History* history = nullptr;
  int64_t first = 0;
  int64_t end = 0;
};

struct Case {
  Shape shape;
  int64_t piece = 128;  // tokens of each sequence that a call is given
  int num_threads = 1;
  CpuStreamMode mode = CpuStreamMode::kImmediate;
};

// Each piece holds keys of every sequence that has some there; what is behind them is NaN.
std::vector<float> Attend(const Case& setup, const std::vector<Slice>& slices) {
  const auto [heads, nope, rope, v] = setup.shape;
  CpuDevice device(setup.num_threads, setup.mode);
  std::vector<float> q;
  std::vector<int32_t> query_starts{0}, positions;
  int64_t longest = 0;
  for (const Slice& slice : slices) {
    const int64_t width = heads * setup.shape.key();
    q.insert(q.end(), &slice.history->q[slice.first * width],
             slice.history->q.data() + slice.end * width);
    for (int64_t p = slice.first; p < slice.end; ++p) {
      positions.push_back(static_cast<int32_t>(p));
    }
    query_starts.push_back(static_cast<int32_t>(positions.size()));
    longest = std::max(longest, slice.end);
  }
  const auto tokens = static_cast<int64_t>(positions.size());
  std::vector<float> out(tokens * heads * v, kNan);
  const float* q_data = device.Upload(q);
  MlaPrefillArgs args;
  args.q = TokenMajor(q_data, tokens, heads, setup.shape.key());
  args.num_sequences = static_cast<int64_t>(slices.size());
  args.query_starts = device.Upload(query_starts);
  args.positions = device.Upload(positions);
  args.scale = 1.0f / std::sqrt(static_cast<float>(setup.shape.key()));
  args.maximum = device.Upload(std::vector<float>(tokens * heads, kNan));
  args.sum = device.Upload(std::vector<float>(tokens * heads, kNan));
  args.out = TokenMajor(out.data(), tokens, heads, v);
  for (int64_t first = 0; first < longest; first += setup.piece) {
    std::vector<float> expanded, k_rope;
    std::vector<int32_t> starts{0}, first_positions;
    for (const Slice& slice : slices) {
      const int64_t end = std::min(first + setup.piece, slice.end);
      const int64_t width = heads * setup.shape.expanded();
      const History& history = *slice.history;
      if (first < end) {
        expanded.insert(expanded.end(), &history.expanded[first * width],
                        history.expanded.data() + end * width);
        k_rope.insert(k_rope.end(), &history.k_rope[first * rope],
                      history.k_rope.data() + end * rope);
      }
      starts.push_back(static_cast<int32_t>(k_rope.size() / rope));
      first_positions.push_back(static_cast<int32_t>(first));
    }
    const int64_t piece_tokens = starts.back();
    expanded.resize(expanded.size() + 100, kNan);
    k_rope.resize(k_rope.size() + 100, kNan);
    const float* expanded_data = device.Upload(expanded);
    args.expanded = TokenMajor(expanded_data, piece_tokens, heads, setup.shape.expanded());
    args.k_rope = FloatMatrix(static_cast<const float*>(device.Upload(k_rope)), piece_tokens, rope);
    args.segment_starts = device.Upload(starts);
    args.segment_first_positions = device.Upload(first_positions);
    args.first = first == 0;
    args.last = first + setup.piece >= longest;
    EXPECT_TRUE(device.kernels().mla_prefill(args, device.stream()).ok());
  }
  device.Synchronize();
  return out;
}

// The same in double precision, a query at a time.
std::vector<float> Reference(const Case& setup, const std::vector<Slice>& slices) {
  const auto [heads, nope, rope, v] = setup.shape;
  const int64_t key = nope + rope;
  const double scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(key)));
  std::vector<float> result;
  for (const Slice& slice : slices) {
    const History& history = *slice.history;
    for (int64_t row = slice.first * heads; row < slice.end * heads; ++row) {
      const float* q = &history.q[row * key];
      std::vector<double> scores;
      for (int64_t token = 0; token <= row / heads; ++token) {
        const float* expanded = &history.expanded[(token * heads + row % heads) * (nope + v)];
        double score = 0;
        for (int64_t i = 0; i < key; ++i) {
          score += static_cast<double>(q[i]) *
                   (i < nope ? expanded[i] : history.k_rope[token * rope + i - nope]);
        }
        scores.push_back(score * scale);
      }
      const double maximum = *std::max_element(scores.begin(), scores.end());
      std::vector<double> out(v, 0.0);
      double sum = 0;
      for (size_t token = 0; token < scores.size(); ++token) {
        const float* value = &history.expanded[(token * heads + row % heads) * (nope + v)] + nope;
        const double weight = std::exp(scores[token] - maximum);
        sum += weight;
        for (int64_t i = 0; i < v; ++i) out[i] += weight * value[i];
      }
      for (int64_t i = 0; i < v; ++i) result.push_back(static_cast<float>(out[i] / sum));
    }
  }
  return result;
}

void ExpectNear(const std::vector<float>& actual, const std::vector<float>& expected,
                double tolerance = 1e-5) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
  }
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

using MlaPrefillOnTarget = OnTarget;
INSTANTIATE_TEST_SUITE_P(Targets, MlaPrefillOnTarget, testing::ValuesIn(EveryTarget()),
                         NameOfTarget);

TEST_P(MlaPrefillOnTarget, MatchesDoublePrecision) {
  std::mt19937 random(1);
  for (const Shape& shape : {Shape{4, 8, 4, 8},
                             {4, 8, 4, 6},
                             {1, 1, 2, 1},
                             {3, 20, 6, 18},
                             {2, 128, 64, 128},
                             {5, 33, 10, 40}}) {
    for (const int64_t piece : {64, 128, 1024}) {
      SCOPED_TRACE(absl::StrCat(shape.heads, "x", shape.nope, "+", shape.rope, "/", shape.v,
                                " pieces of ", piece));
      const History a(shape, 300, random), b(shape, 1, random), c(shape, 130, random);
      const Case setup{.shape = shape,
                       .piece = piece,
                       .num_threads = piece == 64 ? 2 : 1,
                       .mode = piece == 128 ? CpuStreamMode::kDeferred : CpuStreamMode::kImmediate};
      const std::vector<Slice> slices = {{&a, 120, 300}, {&b, 0, 1}, {&c, 0, 130}, {&a, 63, 65}};
      ExpectNear(Attend(setup, slices), Reference(setup, slices));
    }
  }
}

// A position's bits are the same however prompts and contexts are cut.
TEST(MlaPrefill, BitsDoNotDependOnHowTheWorkIsCut) {
  std::mt19937 random(2);
  constexpr int64_t kLength = 300;
  for (const Shape& shape : {Shape{4, 8, 4, 6}, Shape{2, 40, 10, 36}}) {
    const History a(shape, kLength, random), b(shape, 90, random);
    const int64_t width = shape.heads * shape.v;
    Case setup{.shape = shape, .piece = 64};
    const std::vector<float> whole = Attend(setup, {{&a, 0, kLength}});
    for (const int64_t piece : {64, 192, 1024}) {
      setup.piece = piece;
      for (const int num_threads : {1, 2, 3}) {
        setup.num_threads = num_threads;
        SCOPED_TRACE(absl::StrCat("pieces of ", piece, ", threads ", num_threads));
        EXPECT_TRUE(SameBits(Attend(setup, {{&a, 0, kLength}}), whole));
        for (const int64_t count : {1, 7, 64, 200}) {
          const int64_t first = kLength / 2 - 23, end = std::min(first + count, kLength);
          const std::vector<float> expected(whole.begin() + first * width,
                                            whole.begin() + end * width);
          EXPECT_TRUE(SameBits(Attend(setup, {{&a, first, end}}), expected))
              << first << " to " << end;
          std::vector<float> together =
              Attend(setup, {{&b, 0, 31}, {&a, first, end}, {&b, 80, 90}});
          together.erase(together.begin(), together.begin() + 31 * width);
          together.resize((end - first) * width);
          EXPECT_TRUE(SameBits(together, expected)) << first << " to " << end << " in a batch";
        }
      }
    }
  }
}

// What a prompt is computed by and what a generated token is computed by agree: latents expanded by
// kv_b, and kv_b folded into queries and outputs.
TEST(MlaPrefill, AgreesWithAbsorbedAttention) {
  std::mt19937 random(3);
  constexpr int64_t kTokens = 150, kRank = 24;
  const Shape shape{4, 20, 6, 18};
  const int64_t key = shape.key(), expanded = shape.expanded(), heads = shape.heads;
  CpuDevice device(2);
  const std::vector<float> q = RandomFloats(kTokens * heads * key, random);
  const std::vector<float> latents = RandomFloats(kTokens * (kRank + shape.rope), random);
  const std::vector<float> kv_b = RandomFloats(heads * expanded * kRank, random, 0.2f);
  const float scale = 0.2f;
  std::vector<int32_t> starts{0, kTokens}, positions(kTokens), zero{0};
  for (int32_t i = 0; i < kTokens; ++i) positions[i] = i;
  const int32_t* starts_data = device.Upload(starts);
  const int32_t* positions_data = device.Upload(positions);
  const float* q_data = device.Upload(q);
  const float* latent_data = device.Upload(latents);
  const auto pack = [&](const std::vector<float>& rows, int64_t n, int64_t k) {
    const int64_t bytes =
        *device.kernels().packed_weight_bytes({nullptr, DType::kFloat32, n, k, 0});
    PackedWeight weight = {nullptr, DType::kFloat32, n, k, 0};
    void* data = device.Upload(std::vector<std::byte>(bytes));
    weight.data = data;
    EXPECT_TRUE(device.kernels()
                    .pack_weight({reinterpret_cast<const std::byte*>(rows.data()), DType::kFloat32,
                                  k * 4, n, k, 0},
                                 weight, device.stream())
                    .ok());
    device.Synchronize();
    return weight;
  };

  std::vector<float> keys(kTokens * heads * expanded);
  const ConstMatrixView latent(latent_data, DType::kFloat32, kTokens, kRank, kRank + shape.rope);
  const ConstMatrixView k_rope(latent_data + kRank, DType::kFloat32, kTokens, shape.rope,
                               kRank + shape.rope);
  ASSERT_TRUE(device.kernels()
                  .linear({latent, pack(kv_b, heads * expanded, kRank), nullptr,
                           FloatMatrix(keys.data(), kTokens, heads * expanded)},
                          device.stream())
                  .ok());
  std::vector<float> maximum(kTokens * heads), sum(kTokens * heads);
  std::vector<float> by_expansion(kTokens * heads * shape.v, kNan);
  MlaPrefillArgs prefill;
  prefill.q = TokenMajor(q_data, kTokens, heads, key);
  prefill.expanded = TokenMajor(static_cast<const float*>(keys.data()), kTokens, heads, expanded);
  prefill.k_rope = k_rope;
  prefill.num_sequences = 1;
  prefill.segment_starts = prefill.query_starts = starts_data;
  prefill.segment_first_positions = device.Upload(zero);
  prefill.positions = positions_data;
  prefill.scale = scale;
  prefill.maximum = maximum.data();
  prefill.sum = sum.data();
  prefill.out = TokenMajor(by_expansion.data(), kTokens, heads, shape.v);
  ASSERT_TRUE(device.kernels().mla_prefill(prefill, device.stream()).ok());

  // W_UK of a head is [rank, nope], the transpose of its rows of kv_b; W_UV is [v, rank].
  std::vector<PackedWeight> w_uk, w_uv;
  for (int64_t head = 0; head < heads; ++head) {
    const float* rows = &kv_b[head * expanded * kRank];
    std::vector<float> transposed(kRank * shape.nope);
    for (int64_t i = 0; i < shape.nope * kRank; ++i) {
      transposed[i % kRank * shape.nope + i / kRank] = rows[i];
    }
    w_uk.push_back(pack(transposed, kRank, shape.nope));
    w_uv.push_back(pack({rows + shape.nope * kRank, rows + expanded * kRank}, shape.v, kRank));
  }
  std::vector<float> q_latent(kTokens * heads * kRank), out_latent(kTokens * heads * kRank);
  std::vector<float> by_absorption(kTokens * heads * shape.v, kNan);
  const auto absorb = [&](const std::vector<PackedWeight>& weights, const ConstHeadsView& x,
                          const HeadsView& out) {
    for (int64_t head = 0; head < heads; ++head) {
      ConstHeadsView from = x;
      HeadsView to = out;
      from.data = x.At(0, head);
      to.data = out.At(0, head);
      from.heads = to.heads = 1;
      ASSERT_TRUE(
          device.kernels().head_linear({from, {weights[head], 0, 1}, to}, device.stream()).ok());
    }
  };
  absorb(w_uk, {q_data, kTokens, heads, shape.nope, heads * key, key},
         HeadMajor(q_latent.data(), kTokens, heads, kRank));
  std::vector<PageSpan> pages;
  for (int32_t i = 0; i * 16 < kTokens; ++i) {
    pages.push_back({i, std::min<int32_t>(16, kTokens - i * 16), i * 16});
  }
  const std::vector<int32_t> page_starts{0, static_cast<int32_t>(pages.size())};
  std::vector<float> latent_plane(160 * kRank, kNan), rope_plane(160 * shape.rope, kNan);
  for (int64_t token = 0; token < kTokens; ++token) {
    const float* row = &latents[token * (kRank + shape.rope)];
    std::copy_n(row, kRank, &latent_plane[token * kRank]);
    std::copy_n(row + kRank, shape.rope, &rope_plane[token * shape.rope]);
  }
  MlaDecodeArgs decode;
  decode.q_latent = HeadMajor(static_cast<const float*>(q_latent.data()), kTokens, heads, kRank);
  decode.q_rope = {q_data + shape.nope, kTokens, heads, shape.rope, heads * key, key};
  decode.kv = {
      .latent = {device.Upload(latent_plane), DType::kFloat32, 16 * kRank, 16 * kRank},
      .rope = {device.Upload(rope_plane), DType::kFloat32, 16 * shape.rope, 16 * shape.rope},
      .kv_lora_rank = kRank,
      .rope_dim = shape.rope,
      .page_size = 16,
      .page_starts = device.Upload(page_starts),
      .pages = device.Upload(pages)};
  decode.num_sequences = 1;
  decode.query_starts = starts_data;
  decode.positions = positions_data;
  decode.scale = scale;
  decode.out = HeadMajor(out_latent.data(), kTokens, heads, kRank);
  ASSERT_TRUE(device.kernels().mla_decode(decode, device.stream()).ok());
  absorb(w_uv, HeadMajor(static_cast<const float*>(out_latent.data()), kTokens, heads, kRank),
         TokenMajor(by_absorption.data(), kTokens, heads, shape.v));
  device.Synchronize();

  const float largest =
      std::abs(*std::max_element(by_expansion.begin(), by_expansion.end(),
                                 [](float a, float b) { return std::abs(a) < std::abs(b); }));
  ExpectNear(by_absorption, by_expansion, 1e-5 * largest);
}

// A value that is not finite spoils the rows that see it, visibly, and no others.
TEST_P(MlaPrefillOnTarget, NotANumberStaysWithTheRowsThatSeeIt) {
  std::mt19937 random(4);
  const Case setup{.shape = {3, 20, 6, 18}, .piece = 64};
  const Shape& shape = setup.shape;
  for (const int64_t element : {3, 25}) {  // of head 1's key, of its value
    History a(shape, 100, random);
    const std::vector<float> clean = Attend(setup, {{&a, 60, 100}});
    a.expanded[(90 * shape.heads + 1) * shape.expanded() + element] = kNan;
    const std::vector<float> spoilt = Attend(setup, {{&a, 60, 100}});
    for (int64_t row = 0; row < 40 * shape.heads; ++row) {
      const std::vector<float> now(&spoilt[row * shape.v], &spoilt[row * shape.v] + shape.v);
      const std::vector<float> before(&clean[row * shape.v], &clean[row * shape.v] + shape.v);
      if (row / shape.heads < 30 || row % shape.heads != 1) {
        ASSERT_TRUE(SameBits(now, before)) << "row " << row;
      } else {
        ASSERT_TRUE(std::any_of(now.begin(), now.end(), [](float x) { return std::isnan(x); }))
            << "row " << row;
      }
    }
  }
}

TEST(MlaPrefill, RefusesArgumentsByName) {
  CpuDevice device;
  float memory[64] = {};
  const float* in = memory;
  std::vector<int32_t> starts{0, 2}, positions{0, 1}, first{0};
  const MlaPrefillArgs good = {.q = TokenMajor(in, 2, 1, 5),
                               .expanded = TokenMajor(in, 2, 1, 7),
                               .k_rope = FloatMatrix(in, 2, 2),
                               .num_sequences = 1,
                               .segment_starts = starts.data(),
                               .segment_first_positions = first.data(),
                               .query_starts = starts.data(),
                               .positions = positions.data(),
                               .scale = 1.0f,
                               .maximum = memory + 32,
                               .sum = memory + 40,
                               .out = TokenMajor(memory + 48, 2, 1, 4),
                               .first = true,
                               .last = true};
  const auto error = [&](auto spoil) {
    starts = {0, 2};
    first = {0};
    MlaPrefillArgs args = good;
    spoil(args);
    absl::Status status = device.kernels().mla_prefill(args, device.stream());
    if (status.ok()) status = device.stream().Synchronize();
    return std::string(status.message());
  };
  EXPECT_EQ(error([](MlaPrefillArgs&) {}), "");
  EXPECT_THAT(error([](MlaPrefillArgs& a) { a.q.dim = 1; }),
              HasSubstr("mla_prefill: q has 1 elements a head, k_rope 2 and out 4"));
  EXPECT_THAT(error([](MlaPrefillArgs& a) { a.expanded.dim = 6; }),
              HasSubstr("expanded is [2, 1, 6], not [2, 1, 7]"));
  EXPECT_THAT(error([](MlaPrefillArgs& a) { a.k_rope.rows = 1; }),
              HasSubstr("k_rope is [1, 2], not [2, 2]"));
  EXPECT_THAT(error([](MlaPrefillArgs& a) { a.sum = nullptr; }), HasSubstr("sum is null"));
  EXPECT_THAT(error([&](MlaPrefillArgs&) { starts[1] = 3; }),
              HasSubstr("sequence 0: tokens 0 to 3 of 2"));
  EXPECT_THAT(error([&](MlaPrefillArgs&) { first[0] = 63; }),
              HasSubstr("its piece begins at position 63, not at a multiple of 64"));
}

}  // namespace
}  // namespace heddle
