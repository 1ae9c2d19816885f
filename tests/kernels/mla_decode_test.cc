#include "kernels/attention/mla_decode.h"

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
#include "kernels/attention/merge_partials.h"
#include "tests/kernels/cpu_device.h"
#include "tests/kernels/every_target.h"
#include "tests/kernels/stored_type.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  int64_t heads = 4;
  int64_t rank = 16;  // of the latent
  int64_t rope = 4;

  int64_t width() const { return rank + rope; }
};

// The whole history of one sequence.
struct History {
  History(const Shape& shape, int64_t num_tokens, std::mt19937& random)
      : length(num_tokens),
        q(RandomFloats(num_tokens * shape.heads * shape.width(), random)),
        keys(RandomFloats(num_tokens * shape.width(), random)) {}
  int64_t length;
  std::vector<float> q;     // [tokens, heads, rank + rope]
  std::vector<float> keys;  // [tokens, rank + rope]
};

// Queries [first, end) of a history, answered by a cache that holds the pages that `stripe` of
// `stripes` has of tokens [0, end), or of [0, stored) if that is less.
struct Slice {
  const History* history = nullptr;
  int64_t first = 0;
  int64_t end = 0;
  int64_t stored = std::numeric_limits<int64_t>::max();
};

struct Case {
  Shape shape;
  int64_t page_size = 16;
  DType dtype = DType::kFloat32;
  DType rope_dtype = DType::kFloat32;
  int num_threads = 1;
  CpuStreamMode mode = CpuStreamMode::kImmediate;
  bool head_major = false;  // queries and outputs
  int64_t stripe = 0;       // page i of a sequence is on stripe i * 7 / 3 % stripes
  int64_t stripes = 1;

  bool Holds(int64_t page) const { return page * 7 / 3 % stripes == stripe; }
};

struct Result {
  std::vector<float> out;          // [tokens, heads, rank]
  std::vector<float> log_sum_exp;  // [tokens, heads]
};

// What the op is told about one call; tests may spoil it. The pool is NaN where nothing is stored.
struct Call {
  std::vector<float> q;  // [tokens, heads, rank + rope]
  std::vector<int32_t> query_starts{0}, positions, page_starts{0};
  std::vector<PageSpan> pages;
  std::vector<float> latents, ropes;
  int64_t latent_stride = 0, rope_stride = 0;
};

Call MakeCall(const Case& setup, const std::vector<Slice>& slices) {
  const auto [heads, rank, rope] = setup.shape;
  Call call;
  // Odd strides: nothing may rely on dense planes.
  call.latent_stride = setup.page_size * rank + 3;
  call.rope_stride = setup.page_size * rope + 5;
  int64_t num_slots = 1;
  for (const Slice& slice : slices) num_slots += slice.end / setup.page_size + 1;
  call.latents.assign(num_slots * call.latent_stride, kNan);
  call.ropes.assign(num_slots * call.rope_stride, kNan);
  std::vector<int32_t> free_slots(num_slots);
  for (int64_t slot = 0; slot < num_slots; ++slot) free_slots[slot] = static_cast<int32_t>(slot);
  std::shuffle(free_slots.begin(), free_slots.end(), std::mt19937(7));
  for (const Slice& slice : slices) {
    const float* q = slice.history->q.data();
    const int64_t q_width = heads * setup.shape.width();
    call.q.insert(call.q.end(), q + slice.first * q_width, q + slice.end * q_width);
    for (int64_t p = slice.first; p < slice.end; ++p) {
      call.positions.push_back(static_cast<int32_t>(p));
    }
    call.query_starts.push_back(static_cast<int32_t>(call.positions.size()));
    const int64_t stored = std::min(slice.end, slice.stored);
    for (int64_t first = 0; first < stored; first += setup.page_size) {
      if (!setup.Holds(first / setup.page_size)) continue;
      const int32_t slot = free_slots.back();
      free_slots.pop_back();
      const int64_t count = std::min(setup.page_size, stored - first);
      for (int64_t i = 0; i < count; ++i) {
        const float* key = &slice.history->keys[(first + i) * setup.shape.width()];
        std::copy_n(key, rank, &call.latents[slot * call.latent_stride + i * rank]);
        std::copy_n(key + rank, rope, &call.ropes[slot * call.rope_stride + i * rope]);
      }
      call.pages.push_back({slot, static_cast<int32_t>(count), static_cast<int32_t>(first)});
    }
    call.page_starts.push_back(static_cast<int32_t>(call.pages.size()));
  }
  return call;
}

absl::StatusOr<Result> RunCall(const Case& setup, const Call& call) {
  CpuDevice device(setup.num_threads, setup.mode);
  const auto [heads, rank, rope] = setup.shape;
  const int64_t width = rank + rope;
  const auto tokens = static_cast<int64_t>(call.positions.size());
  std::vector<float> q = call.q, out(tokens * heads * rank, kNan);
  std::vector<float> log_sum_exp(tokens * heads, kNan);
  ConstHeadsView q_view = TokenMajor(static_cast<const float*>(q.data()), tokens, heads, width);
  if (setup.head_major) {
    for (int64_t row = 0; row < tokens * heads; ++row) {
      const int64_t source = row % tokens * heads + row / tokens;
      std::copy_n(&call.q[source * width], width, &q[row * width]);
    }
    q_view = HeadMajor(static_cast<const float*>(q.data()), tokens, heads, width);
  }
  MlaDecodeArgs args;
  args.q_latent = args.q_rope = q_view;
  args.q_latent.dim = rank;
  args.q_rope.dim = rope;
  args.q_rope.data = q_view.data + (q.empty() ? 0 : rank);
  args.kv = {.latent = {device.Upload(Encode(setup.dtype, call.latents)), setup.dtype,
                        call.latent_stride, setup.page_size * rank},
             .rope = {device.Upload(Encode(setup.rope_dtype, call.ropes)), setup.rope_dtype,
                      call.rope_stride, setup.page_size * rope},
             .kv_lora_rank = rank,
             .rope_dim = rope,
             .page_size = setup.page_size,
             .page_starts = device.Upload(call.page_starts),
             .pages = device.Upload(call.pages)};
  args.num_sequences = static_cast<int64_t>(call.query_starts.size()) - 1;
  args.query_starts = device.Upload(call.query_starts);
  args.positions = device.Upload(call.positions);
  args.scale = 1.0f / std::sqrt(static_cast<float>(width));
  args.out = setup.head_major ? HeadMajor(out.data(), tokens, heads, rank)
                              : TokenMajor(out.data(), tokens, heads, rank);
  args.log_sum_exp = log_sum_exp.data();
  absl::Status status = device.kernels().mla_decode(args, device.stream());
  if (!status.ok()) return status;
  status = device.stream().Synchronize();
  if (!status.ok()) return status;
  Result result;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < heads; ++head) {
      const float* row = args.out.At(token, head);
      result.out.insert(result.out.end(), row, row + rank);
      result.log_sum_exp.push_back(log_sum_exp[head * tokens + token]);
    }
  }
  return result;
}

Result Attend(const Case& setup, const std::vector<Slice>& slices) {
  const auto result = RunCall(setup, MakeCall(setup, slices));
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : Result{};
}

// The same in double precision, a query at a time.
Result Reference(const Case& setup, const std::vector<Slice>& slices) {
  Result result;
  const auto [heads, rank, rope] = setup.shape;
  const int64_t width = rank + rope;
  const double scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(width)));
  for (const Slice& slice : slices) {
    const History& history = *slice.history;
    const auto key_at = [&](int64_t token, int64_t i) {
      return static_cast<double>(Stored(i < setup.shape.rank ? setup.dtype : setup.rope_dtype,
                                        history.keys[token * setup.shape.width() + i]));
    };
    for (int64_t row = slice.first * heads; row < slice.end * heads; ++row) {
      const int64_t visible = std::min(row / heads + 1, slice.stored);
      std::vector<double> scores;
      std::vector<int64_t> tokens;
      double maximum = -std::numeric_limits<double>::infinity();
      for (int64_t token = 0; token < visible; ++token) {
        if (!setup.Holds(token / setup.page_size)) continue;
        double score = 0;
        for (int64_t i = 0; i < width; ++i) {
          score += static_cast<double>(history.q[row * width + i]) * key_at(token, i);
        }
        scores.push_back(score * scale);
        tokens.push_back(token);
        maximum = std::max(maximum, scores.back());
      }
      std::vector<double> out(rank, 0.0);
      double sum = 0;
      for (size_t j = 0; j < scores.size(); ++j) {
        const double weight = std::exp(scores[j] - maximum);
        sum += weight;
        for (int64_t i = 0; i < rank; ++i) out[i] += weight * key_at(tokens[j], i);
      }
      for (int64_t i = 0; i < rank; ++i) {
        result.out.push_back(static_cast<float>(sum > 0 ? out[i] / sum : 0.0));
      }
      result.log_sum_exp.push_back(static_cast<float>(maximum + std::log(sum > 0 ? sum : 1.0)));
    }
  }
  return result;
}

void ExpectNear(const Result& actual, const Result& expected) {
  ASSERT_EQ(actual.out.size(), expected.out.size());
  ASSERT_EQ(actual.log_sum_exp.size(), expected.log_sum_exp.size());
  for (size_t i = 0; i < expected.out.size(); ++i) {
    ASSERT_NEAR(actual.out[i], expected.out[i], 1e-5) << "element " << i;
  }
  for (size_t i = 0; i < expected.log_sum_exp.size(); ++i) {
    if (std::isinf(expected.log_sum_exp[i])) {
      ASSERT_EQ(actual.log_sum_exp[i], expected.log_sum_exp[i]) << "row " << i;
    } else {
      ASSERT_NEAR(actual.log_sum_exp[i], expected.log_sum_exp[i], 1e-5) << "row " << i;
    }
  }
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

using MlaDecodeOnTarget = OnTarget;
INSTANTIATE_TEST_SUITE_P(Targets, MlaDecodeOnTarget, testing::ValuesIn(EveryTarget()),
                         NameOfTarget);

TEST_P(MlaDecodeOnTarget, MatchesDoublePrecision) {
  std::mt19937 random(1);
  const std::vector<Shape> shapes = {{1, 1, 1},   {4, 16, 4},  {16, 64, 8}, {5, 20, 6},
                                     {9, 33, 10}, {20, 40, 2}, {35, 24, 4}, {2, 300, 64}};
  for (const Shape& shape : shapes) {
    for (const int64_t page_size : {1, 3, 16, 64, 128}) {
      SCOPED_TRACE(
          absl::StrCat(shape.heads, "x", shape.rank, "+", shape.rope, " page ", page_size));
      const History a(shape, 150, random), b(shape, 1, random), c(shape, 65, random);
      const Case setup{.shape = shape,
                       .page_size = page_size,
                       .num_threads = page_size % 2 == 0 ? 2 : 1,
                       .head_major = page_size >= 64};
      // Decode, a prompt's first token, several tokens, one at the edge of a block, a whole prompt.
      const std::vector<Slice> slices = {
          {&a, 149, 150}, {&b, 0, 1}, {&a, 60, 72}, {&c, 64, 65}, {&c, 0, 33}};
      ExpectNear(Attend(setup, slices), Reference(setup, slices));
    }
  }
}

TEST(MlaDecode, ReadsEveryPlaneType) {
  std::mt19937 random(2);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType rope_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(
          absl::StrCat(std::string(DTypeName(dtype)), " ", std::string(DTypeName(rope_dtype))));
      for (const Shape& shape : {Shape{6, 20, 6}, Shape{6, 48, 16}}) {
        const Case setup{.shape = shape, .page_size = 3, .dtype = dtype, .rope_dtype = rope_dtype};
        const History a(setup.shape, 400, random);
        const std::vector<Slice> slices = {{&a, 0, 9}, {&a, 390, 400}, {&a, 256, 257}};
        ExpectNear(Attend(setup, slices), Reference(setup, slices));
      }
    }
  }
}

// A position's bits are the same however it is computed.
TEST(MlaDecode, BitsDoNotDependOnHowTheWorkIsCut) {
  std::mt19937 random(3);
  constexpr int64_t kLength = 2 * kMlaChunk + 90;
  for (const Shape& shape : {Shape{4, 40, 6}, Shape{16, 32, 8}, Shape{40, 16, 16}}) {
    const History a(shape, kLength, random), b(shape, 90, random);
    const int64_t width = shape.heads * shape.rank;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      if (dtype != DType::kFloat32 && shape.heads != 16) continue;  // widened the same for all
      Case setup{.shape = shape, .page_size = 64, .dtype = dtype, .rope_dtype = dtype};
      const Result whole = Attend(setup, {{&a, 0, kLength}});
      ExpectNear(whole, Reference(setup, {{&a, 0, kLength}}));
      for (const int64_t page_size : {1, 3, 16, 128}) {
        setup.page_size = page_size;
        for (const int num_threads : {1, 2, 3}) {
          setup.num_threads = num_threads;
          setup.mode = num_threads == 2 ? CpuStreamMode::kDeferred : CpuStreamMode::kImmediate;
          SCOPED_TRACE(
              absl::StrCat(shape.heads, " heads, page ", page_size, " threads ", num_threads));
          // Positions [first, end), alone and with others in the batch.
          for (const int64_t count : {1, 7, 64}) {
            for (int64_t first = 290 - count; first < kLength; first += 301) {
              const int64_t end = std::min(first + count, kLength);
              const std::vector<float> expected(whole.out.begin() + first * width,
                                                whole.out.begin() + end * width);
              EXPECT_TRUE(SameBits(Attend(setup, {{&a, first, end}}).out, expected))
                  << first << " to " << end;
              Result together = Attend(setup, {{&b, 0, 31}, {&a, first, end}, {&b, 80, 90}});
              together.out.erase(together.out.begin(), together.out.begin() + 31 * width);
              together.out.resize((end - first) * width);
              EXPECT_TRUE(SameBits(together.out, expected))
                  << first << " to " << end << " in a batch";
            }
          }
        }
      }
    }
  }
}

// What each stripe holds, merged in the order of stripes, is what one rank would have computed.
TEST(MlaDecode, StripesMergeToTheWhole) {
  std::mt19937 random(4);
  const Shape shape{6, 20, 6};
  const History a(shape, 700, random), b(shape, 40, random);
  const std::vector<Slice> slices = {{&a, 699, 700}, {&b, 30, 40}, {&b, 0, 2}, {&a, 255, 257}};
  for (const int64_t page_size : {1, 3, 16, 64}) {
    Case setup{.shape = shape, .page_size = page_size};
    const Result whole = Attend(setup, slices);
    for (const int64_t stripes : {2, 3, 8}) {
      SCOPED_TRACE(absl::StrCat("page ", page_size, " stripes ", stripes));
      std::vector<float> partials, log_sum_exps;
      setup.stripes = stripes;
      for (setup.stripe = 0; setup.stripe < stripes; ++setup.stripe) {
        const Result part = Attend(setup, slices);
        ExpectNear(part, Reference(setup, slices));
        partials.insert(partials.end(), part.out.begin(), part.out.end());
        log_sum_exps.insert(log_sum_exps.end(), part.log_sum_exp.begin(), part.log_sum_exp.end());
      }
      CpuDevice device(2);
      Result merged = {std::vector<float>(whole.out.size(), kNan),
                       std::vector<float>(whole.log_sum_exp.size(), kNan)};
      const auto tokens = static_cast<int64_t>(whole.log_sum_exp.size()) / shape.heads;
      const float* const parts = partials.data();
      const float* const sums = log_sum_exps.data();
      const MergePartialsArgs args = {
          .partials = TokenMajor(parts, tokens, shape.heads, shape.rank),
          .partial_stride = tokens * shape.heads * shape.rank,
          .log_sum_exps = TokenMajor(sums, tokens, shape.heads, 1),
          .log_sum_exp_stride = tokens * shape.heads,
          .num_parts = stripes,
          .out = TokenMajor(merged.out.data(), tokens, shape.heads, shape.rank),
          .log_sum_exp = TokenMajor(merged.log_sum_exp.data(), tokens, shape.heads, 1)};
      ASSERT_TRUE(device.kernels().merge_partials(args, device.stream()).ok());
      device.Synchronize();
      ExpectNear(merged, whole);
      setup.stripes = 1;
      setup.stripe = 0;
    }
  }
}

TEST(MlaDecode, AQueryThatSeesNothingGivesZeros) {
  std::mt19937 random(5);
  const Case setup{.shape = {4, 16, 4}, .page_size = 16, .num_threads = 2};
  const History a(setup.shape, 64, random);
  // The rank holds no page of the first sequence.
  const std::vector<Slice> slices = {{&a, 20, 23, 0}, {&a, 30, 31}};
  const Result result = Attend(setup, slices);
  ExpectNear(result, Reference(setup, slices));
  EXPECT_EQ(result.out[0], 0.0f);
  EXPECT_EQ(result.log_sum_exp[0], -kInfinity);
  EXPECT_NE(result.log_sum_exp.back(), -kInfinity);
}

// Pages may be empty, and the positions between pages may be held elsewhere.
TEST(MlaDecode, PagesMayLeaveGaps) {
  std::mt19937 random(6);
  const Case setup{.shape = {4, 16, 4}, .page_size = 16};
  const History a(setup.shape, 400, random);
  Call call = MakeCall(setup, {{&a, 390, 400}});
  std::vector<PageSpan> kept;
  History seen = a;
  seen.keys.clear();
  for (size_t i = 0; i < call.pages.size(); ++i) {
    if (i % 5 == 1 || i == 8) continue;
    PageSpan page = call.pages[i];
    if (i % 3 == 0) page.num_valid = static_cast<int32_t>(i % 7);
    kept.push_back(page);
    const float* keys = &a.keys[page.first_position * 20];
    seen.keys.insert(seen.keys.end(), keys, keys + page.num_valid * 20);
  }
  call.pages = kept;
  call.page_starts[1] = static_cast<int32_t>(kept.size());
  call.positions.assign(10, 399);  // so that each sees everything
  const auto result = RunCall(setup, call);
  ASSERT_TRUE(result.ok()) << result.status();
  // The reference over the stored tokens alone, moved together.
  const auto stored = static_cast<int64_t>(seen.keys.size()) / 20;
  seen.q.assign((stored + 10) * 80, 0.0f);
  std::copy(a.q.end() - 10 * 80, a.q.end(), seen.q.end() - 10 * 80);
  ExpectNear(*result, Reference(setup, {{&seen, stored, stored + 10, stored}}));
}

// A value that is not finite spoils the rows that see it, visibly, and no others.
TEST_P(MlaDecodeOnTarget, NotANumberStaysWithTheRowsThatSeeIt) {
  std::mt19937 random(8);
  const Case setup{.shape = {6, 20, 6}, .page_size = 16};
  for (const int64_t element : {3, 22}) {  // of the latent, of the rotated key
    History a(setup.shape, 100, random), b(setup.shape, 30, random);
    const std::vector<Slice> slices = {{&a, 70, 100}, {&b, 0, 30}};
    const Result clean = Attend(setup, slices);
    a.keys[90 * 26 + element] = kNan;
    const Result spoilt = Attend(setup, slices);
    for (int64_t row = 0; row < 60 * 6; ++row) {
      const std::vector<float> now(&spoilt.out[row * 20], &spoilt.out[row * 20] + 20);
      const std::vector<float> before(&clean.out[row * 20], &clean.out[row * 20] + 20);
      if (row / 6 < 20 || row / 6 >= 30) {
        ASSERT_TRUE(SameBits(now, before)) << "row " << row;
      } else {
        ASSERT_TRUE(std::any_of(now.begin(), now.end(), [](float x) { return std::isnan(x); }))
            << "row " << row;
      }
    }
  }
}

TEST(MlaDecode, LargeScoresDoNotOverflow) {
  std::mt19937 random(9);
  const Case setup{.shape = {3, 16, 4}, .page_size = 16};
  History a(setup.shape, 300, random);
  for (float& q : a.q) q *= 100.0f;
  const Result result = Attend(setup, {{&a, 0, 300}});
  const Result expected = Reference(setup, {{&a, 0, 300}});
  for (size_t i = 0; i < expected.out.size(); ++i) {
    ASSERT_NEAR(result.out[i], expected.out[i], 1e-3) << "element " << i;
  }
}

TEST(MlaDecode, ShardsWithoutHeadsOrTokensDoNothing) {
  const Case no_heads{.shape = {0, 16, 4}};
  std::mt19937 random(10);
  const History a(no_heads.shape, 20, random);
  EXPECT_TRUE(Attend(no_heads, {{&a, 0, 20}}).out.empty());
  EXPECT_TRUE(Attend({}, {}).out.empty());
}

TEST(MlaDecode, RefusesArgumentsByName) {
  std::mt19937 random(11);
  const Case good;
  const History a(good.shape, 20, random);
  const Call call = MakeCall(good, {{&a, 10, 20}});
  const auto error = [&](auto spoil) {
    Case setup = good;
    Call bad = call;
    spoil(setup, bad);
    return std::string(RunCall(setup, bad).status().message());
  };
  EXPECT_EQ(error([](Case&, Call&) {}), "");
  EXPECT_THAT(error([](Case& s, Call&) { s.dtype = DType::kInt8; }),
              HasSubstr("mla_decode: kv.latent is int8, not float32, bfloat16 or float16"));
  EXPECT_THAT(error([](Case& s, Call&) { s.rope_dtype = DType::kQ8_0; }),
              HasSubstr("kv.rope is Q8_0"));
  EXPECT_THAT(error([](Case&, Call& c) { c.latent_stride = 7; }), HasSubstr("slot stride 7"));
  EXPECT_THAT(error([](Case&, Call& c) {
                c.query_starts = {0, 11};
              }),
              HasSubstr("sequence 0: tokens 0 to 11 of 10"));
  EXPECT_THAT(error([](Case&, Call& c) { c.page_starts = {2, 1}; }), HasSubstr("pages 2 to 1"));
  EXPECT_THAT(error([](Case&, Call& c) { c.pages[0].num_valid = 17; }),
              HasSubstr("holds 17 of 16 tokens"));
  EXPECT_THAT(error([](Case&, Call& c) { c.pages[1].first_position = 15; }),
              HasSubstr("page 1 begins at position 15, before 16"));
}

}  // namespace
}  // namespace heddle
