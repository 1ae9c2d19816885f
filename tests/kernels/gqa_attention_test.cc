#include "kernels/attention/gqa_attention.h"

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
#include "tests/kernels/cpu_device.h"
#include "tests/kernels/stored_type.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Heads {
  int64_t query = 4;
  int64_t kv = 2;
  int64_t dim = 16;
};

// The whole history of one sequence, [tokens, heads * dim] each.
struct History {
  History(const Heads& heads, int64_t num_tokens, std::mt19937& random)
      : length(num_tokens),
        q(RandomFloats(num_tokens * heads.query * heads.dim, random)),
        k(RandomFloats(num_tokens * heads.kv * heads.dim, random)),
        v(RandomFloats(num_tokens * heads.kv * heads.dim, random)) {}
  int64_t length;
  std::vector<float> q, k, v;
};

// Queries [first, end) of a history, answered by a cache that holds the keys from `first_key` on.
struct Slice {
  const History* history = nullptr;
  int64_t first = 0;
  int64_t end = 0;
  int64_t first_key = 0;
};

struct Case {
  Heads heads;
  int64_t page_size = 16;
  int64_t window = 0;
  DType dtype = DType::kFloat32;
  int num_threads = 1;
  CpuStreamMode mode = CpuStreamMode::kImmediate;
};

struct Result {
  std::vector<float> out;  // [tokens, query_heads * dim]
  std::vector<float> log_sum_exp;
};

// A pool of pages in scrambled order, NaN wherever no token is stored.
class Pool {
 public:
  Pool(const Case& setup, int64_t num_slots) : setup_(setup) {
    const int64_t page = setup.heads.dim * setup.page_size;
    head_stride_ = page + 3;  // odd strides: nothing may rely on dense planes
    slot_stride_ = setup.heads.kv * head_stride_ + 5;
    k_.assign(num_slots * slot_stride_, kNan);
    v_.assign(num_slots * slot_stride_, kNan);
    for (int64_t slot = 0; slot < num_slots; ++slot) free_.push_back(static_cast<int32_t>(slot));
    std::shuffle(free_.begin(), free_.end(), std::mt19937(7));
  }

  // Stores tokens [first, end) with `first` at the start of a page.
  std::vector<PageSpan> Store(const History& history, int64_t first, int64_t end) {
    std::vector<PageSpan> pages;
    for (int64_t token = first; token < end; token += setup_.page_size) {
      pages.push_back(StorePage(history, token, std::min(token + setup_.page_size, end)));
    }
    return pages;
  }

  PageSpan StorePage(const History& history, int64_t first, int64_t end) {
    const int32_t slot = free_.back();
    free_.pop_back();
    const auto [query, kv, dim] = setup_.heads;
    for (int64_t token = first; token < end; ++token) {
      for (int64_t head = 0; head < kv; ++head) {
        for (int64_t i = 0; i < dim; ++i) {
          const int64_t base = slot * slot_stride_ + head * head_stride_;
          const int64_t source = (token * kv + head) * dim + i;
          k_[base + i * setup_.page_size + token - first] = history.k[source];
          v_[base + (token - first) * dim + i] = history.v[source];
        }
      }
    }
    return {slot, static_cast<int32_t>(end - first), static_cast<int32_t>(first)};
  }

  KvPlane Plane(CpuDevice& device, bool keys) const {
    return {device.Upload(Encode(setup_.dtype, keys ? k_ : v_)), setup_.dtype, slot_stride_,
            head_stride_};
  }

 private:
  Case setup_;
  int64_t head_stride_, slot_stride_;
  std::vector<float> k_, v_;
  std::vector<int32_t> free_;
};

// What the op is told about one call; tests may spoil it.
struct Call {
  std::vector<float> q;
  std::vector<int32_t> query_starts{0}, positions, page_starts{0};
  std::vector<PageSpan> pages;
};

Call MakeCall(const Case& setup, const std::vector<Slice>& slices, Pool& pool) {
  Call call;
  const int64_t width = setup.heads.query * setup.heads.dim;
  for (const Slice& slice : slices) {
    const float* q = slice.history->q.data();
    call.q.insert(call.q.end(), q + slice.first * width, q + slice.end * width);
    for (int64_t p = slice.first; p < slice.end; ++p) {
      call.positions.push_back(static_cast<int32_t>(p));
    }
    call.query_starts.push_back(static_cast<int32_t>(call.positions.size()));
    for (const PageSpan& page : pool.Store(*slice.history, slice.first_key, slice.end)) {
      call.pages.push_back(page);
    }
    call.page_starts.push_back(static_cast<int32_t>(call.pages.size()));
  }
  return call;
}

absl::StatusOr<Result> RunCall(const Case& setup, const Call& call, const Pool& pool) {
  CpuDevice device(setup.num_threads, setup.mode);
  const int64_t tokens = call.positions.size();
  const int64_t width = setup.heads.query * setup.heads.dim;
  Result result{std::vector<float>(tokens * width, kNan),
                std::vector<float>(tokens * setup.heads.query, kNan)};
  GqaAttentionArgs args;
  args.q = FloatMatrix(static_cast<const float*>(device.Upload(call.q)), tokens, width);
  args.kv = {.k = pool.Plane(device, true),
             .v = pool.Plane(device, false),
             .num_kv_heads = setup.heads.kv,
             .head_dim = setup.heads.dim,
             .page_size = setup.page_size,
             .page_starts = device.Upload(call.page_starts),
             .pages = device.Upload(call.pages)};
  args.kv.k.dtype = setup.dtype;
  args.num_query_heads = setup.heads.query;
  args.num_sequences = static_cast<int64_t>(call.query_starts.size()) - 1;
  args.query_starts = device.Upload(call.query_starts);
  args.positions = device.Upload(call.positions);
  args.scale = 1.0f / std::sqrt(static_cast<float>(setup.heads.dim));
  args.window = setup.window;
  args.out = FloatMatrix(result.out.data(), tokens, width);
  args.log_sum_exp = result.log_sum_exp.data();
  absl::Status status = device.kernels().gqa_attention(args, device.stream());
  if (!status.ok()) return status;
  status = device.stream().Synchronize();
  if (!status.ok()) return status;
  return result;
}

Result Attend(const Case& setup, const std::vector<Slice>& slices) {
  int64_t num_slots = 1;
  for (const Slice& slice : slices) num_slots += slice.end / setup.page_size + 1;
  Pool pool(setup, num_slots);
  const Call call = MakeCall(setup, slices, pool);
  const auto result = RunCall(setup, call, pool);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : Result{};
}

// The same in double precision, a query at a time.
Result Reference(const Case& setup, const std::vector<Slice>& slices) {
  Result result;
  const auto [query_heads, kv_heads, dim] = setup.heads;
  const double scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(dim)));
  for (const Slice& slice : slices) {
    const History& history = *slice.history;
    for (int64_t p = slice.first; p < slice.end; ++p) {
      const int64_t window_first = setup.window > 0 ? p - setup.window + 1 : 0;
      for (int64_t head = 0; head < query_heads; ++head) {
        const int64_t kv_head = head / (query_heads / kv_heads);
        std::vector<double> scores;
        double maximum = -std::numeric_limits<double>::infinity();
        const int64_t begin = std::max(window_first, slice.first_key);
        for (int64_t key = begin; key <= p; ++key) {
          double score = 0;
          for (int64_t i = 0; i < dim; ++i) {
            score += static_cast<double>(history.q[(p * query_heads + head) * dim + i]) *
                     Stored(setup.dtype, history.k[(key * kv_heads + kv_head) * dim + i]);
          }
          scores.push_back(score * scale);
          maximum = std::max(maximum, scores.back());
        }
        std::vector<double> out(dim, 0.0);
        double sum = 0;
        for (size_t j = 0; j < scores.size(); ++j) {
          const double weight = std::exp(scores[j] - maximum);
          sum += weight;
          const int64_t row = ((begin + j) * kv_heads + kv_head) * dim;
          for (int64_t i = 0; i < dim; ++i) {
            out[i] += weight * Stored(setup.dtype, history.v[row + i]);
          }
        }
        for (int64_t i = 0; i < dim; ++i) {
          result.out.push_back(static_cast<float>(sum > 0 ? out[i] / sum : 0.0));
        }
        result.log_sum_exp.push_back(static_cast<float>(maximum + std::log(sum > 0 ? sum : 1.0)));
      }
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
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectSameBits(const Result& actual, const Result& expected) {
  EXPECT_TRUE(SameBits(actual.out, expected.out));
  EXPECT_TRUE(SameBits(actual.log_sum_exp, expected.log_sum_exp));
}

TEST(GqaAttention, MatchesDoublePrecision) {
  std::mt19937 random(1);
  const std::vector<Heads> shapes = {{1, 1, 1},  {4, 2, 16},  {9, 3, 64}, {8, 8, 20},
                                     {7, 1, 33}, {12, 2, 80}, {5, 1, 128}};
  for (const Heads& heads : shapes) {
    for (const int64_t page_size : {1, 3, 16, 24, 64, 128}) {
      for (const int64_t window : {0, 1, 5, 70}) {
        SCOPED_TRACE(absl::StrCat(heads.query, "/", heads.kv, "x", heads.dim, " page ", page_size,
                                  " window ", window));
        const History a(heads, 150, random), b(heads, 1, random), c(heads, 65, random);
        const Case setup{.heads = heads,
                         .page_size = page_size,
                         .window = window,
                         .num_threads = window == 0 ? 2 : 1};
        // Prefill, a first token, a chunk in the middle, decode at the edge of a chunk.
        const std::vector<Slice> slices = {{&a, 0, 70}, {&b, 0, 1}, {&a, 120, 150}, {&c, 64, 65}};
        ExpectNear(Attend(setup, slices), Reference(setup, slices));
      }
    }
  }
}

TEST(GqaAttention, ReadsEveryPlaneType) {
  std::mt19937 random(2);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t page_size : {1, 3, 16, 64, 128}) {
      SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " page ", page_size));
      const Case setup{.heads = {6, 2, 24}, .page_size = page_size, .dtype = dtype};
      const History a(setup.heads, 200, random);
      const std::vector<Slice> slices = {{&a, 0, 9}, {&a, 190, 200}, {&a, 129, 130}};
      ExpectNear(Attend(setup, slices), Reference(setup, slices));
    }
  }
}

// A position's bits are the same however it is computed.
TEST(GqaAttention, BitsDoNotDependOnHowTheWorkIsCut) {
  std::mt19937 random(3);
  const Heads heads{6, 2, 40};
  constexpr int64_t kLength = 2 * kAttentionChunk + 90;
  const History a(heads, kLength, random), b(heads, 90, random);
  const int64_t width = heads.query * heads.dim;
  for (const int64_t window : {0, 100}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Case setup{.heads = heads, .page_size = 64, .window = window, .dtype = dtype};
      const Result whole = Attend(setup, {{&a, 0, kLength}});
      ExpectNear(whole, Reference(setup, {{&a, 0, kLength}}));
      // Positions [first, end), alone and with others in the batch.
      const auto expect_same_part = [&](int64_t first, int64_t end) {
        const std::vector<float> expected(whole.out.begin() + first * width,
                                          whole.out.begin() + end * width);
        EXPECT_TRUE(SameBits(Attend(setup, {{&a, first, end}}).out, expected))
            << first << " to " << end;
        Result together = Attend(setup, {{&b, 0, 31}, {&a, first, end}, {&b, 80, 90}});
        together.out.erase(together.out.begin(), together.out.begin() + 31 * width);
        together.out.resize((end - first) * width);
        EXPECT_TRUE(SameBits(together.out, expected)) << first << " to " << end << " in a batch";
      };
      for (const int64_t page_size : {1, 3, 16, 64, 128}) {
        setup.page_size = page_size;
        for (const int num_threads : {1, 2, 3}) {
          setup.num_threads = num_threads;
          setup.mode = num_threads == 2 ? CpuStreamMode::kDeferred : CpuStreamMode::kImmediate;
          SCOPED_TRACE(
              absl::StrCat("window ", window, " page ", page_size, " threads ", num_threads));
          ExpectSameBits(Attend(setup, {{&a, 0, kLength}}), whole);
          // Chunked prefill, and decode. With more threads, where the context is cut among them.
          for (const int64_t chunk : {1, 7, 64}) {
            const int64_t step = num_threads == 1 ? std::max<int64_t>(chunk, 61) : 299;
            for (int64_t first = step - 1; first < kLength; first += step) {
              expect_same_part(first, std::min(first + chunk, kLength));
            }
          }
        }
      }
    }
  }
}

// Leading pages that a window has left behind may be gone: positions come from the page spans.
TEST(GqaAttention, ReleasedLeadingPagesChangeNothing) {
  std::mt19937 random(4);
  const Heads heads{4, 2, 16};
  const History a(heads, 300, random);
  for (const int64_t page_size : {1, 3, 16, 64, 128}) {
    const Case setup{.heads = heads, .page_size = page_size, .window = 20};
    const Result kept = Attend(setup, {{&a, 290, 300}});
    const int64_t first_key = 271 / page_size * page_size;
    const Result released = Attend(setup, {{&a, 290, 300, first_key}});
    ExpectSameBits(released, kept);
    ExpectNear(released, Reference(setup, {{&a, 290, 300, first_key}}));
  }
}

// Pages need be neither full nor contiguous in position; empty ones are passed over.
TEST(GqaAttention, PagesMayLeaveGaps) {
  std::mt19937 random(5);
  for (const int64_t page_size : {3, 16, 128}) {
    const Case setup{.heads = {4, 2, 16}, .page_size = page_size};
    const History a(setup.heads, 400, random);
    Pool pool(setup, 400);
    Call call = MakeCall(setup, {}, pool);
    // Tokens stored: runs of 1 to page_size tokens with gaps between.
    std::vector<bool> stored(400, false);
    std::mt19937 choice(6);
    for (int64_t token = 5; token < 399;) {
      const int64_t count = std::min<int64_t>(1 + choice() % page_size, 399 - token);
      call.pages.push_back(pool.StorePage(a, token, token + count));
      for (int64_t i = 0; i < count; ++i) stored[token + i] = true;
      token += count + choice() % 30;
      call.pages.push_back({0, 0, static_cast<int32_t>(token)});
    }
    call.q.assign(a.q.end() - 4 * 16, a.q.end());
    call.positions = {399};
    call.query_starts.push_back(1);
    call.page_starts.push_back(static_cast<int32_t>(call.pages.size()));
    const auto result = RunCall(setup, call, pool);
    ASSERT_TRUE(result.ok()) << result.status();

    // The reference over the stored tokens alone, moved together.
    History packed = a;
    packed.k.clear();
    packed.v.clear();
    for (int64_t token = 0; token < 400; ++token) {
      if (!stored[token]) continue;
      packed.k.insert(packed.k.end(), &a.k[token * 32], &a.k[token * 32] + 32);
      packed.v.insert(packed.v.end(), &a.v[token * 32], &a.v[token * 32] + 32);
    }
    const int64_t num_stored = static_cast<int64_t>(packed.k.size()) / 32;
    packed.q.assign(num_stored * 64, 0.0f);
    std::copy(call.q.begin(), call.q.end(), packed.q.end() - 64);
    ExpectNear(*result, Reference(setup, {{&packed, num_stored - 1, num_stored}}));
  }
}

TEST(GqaAttention, AQueryThatSeesNothingGivesZeros) {
  std::mt19937 random(7);
  const Case setup{.heads = {4, 2, 16}, .page_size = 16, .window = 8, .num_threads = 2};
  const History a(setup.heads, 64, random);
  // Only tokens from 48 on are stored; the queries at 20 to 47 precede them.
  const Result result = Attend(setup, {{&a, 20, 64, 48}});
  ExpectNear(result, Reference(setup, {{&a, 20, 64, 48}}));
  EXPECT_EQ(result.out[0], 0.0f);
  EXPECT_EQ(result.log_sum_exp[0], -std::numeric_limits<float>::infinity());

  Pool pool(setup, 1);
  Call call = MakeCall(setup, {}, pool);
  call.q.assign(64, 1.0f);
  call.positions = {3};
  call.query_starts.push_back(1);
  call.page_starts.push_back(0);
  const auto empty = RunCall(setup, call, pool);
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE(SameBits(empty->out, std::vector<float>(64, 0.0f)));
}

// A value that is not finite spoils the rows that see it, visibly, and no others.
TEST(GqaAttention, NotANumberStaysWithTheRowsThatSeeIt) {
  std::mt19937 random(8);
  for (const bool in_key : {true, false}) {
    for (const float poison : {kNan, std::numeric_limits<float>::infinity()}) {
      const Case setup{.heads = {6, 2, 16}, .page_size = 16, .window = 70};
      History a(setup.heads, 200, random);
      const Result clean = Attend(setup, {{&a, 0, 200}});
      (in_key ? a.k : a.v)[(90 * 2 + 1) * 16 + 3] = poison;  // token 90, KV head 1
      const Result spoilt = Attend(setup, {{&a, 0, 200}});
      for (int64_t row = 0; row < 200 * 6; ++row) {
        const int64_t token = row / 6, head = row % 6;
        const std::vector<float> now(&spoilt.out[row * 16], &spoilt.out[row * 16] + 16);
        const std::vector<float> before(&clean.out[row * 16], &clean.out[row * 16] + 16);
        if (token < 90 || token >= 160 || head < 3) {
          ASSERT_TRUE(SameBits(now, before)) << "token " << token << " head " << head;
        } else if (!in_key || std::isnan(poison)) {
          ASSERT_TRUE(
              std::any_of(now.begin(), now.end(), [](float x) { return !std::isfinite(x); }))
              << "token " << token << " head " << head;
        }
      }
    }
  }
}

TEST(GqaAttention, LargeScoresDoNotOverflow) {
  std::mt19937 random(9);
  const Case setup{.heads = {2, 1, 8}, .page_size = 16};
  History a(setup.heads, 300, random);
  for (float& q : a.q) q *= 100.0f;
  const Result result = Attend(setup, {{&a, 0, 300}});
  const Result expected = Reference(setup, {{&a, 0, 300}});
  for (size_t i = 0; i < expected.out.size(); ++i) {
    ASSERT_NEAR(result.out[i], expected.out[i], 1e-3) << "element " << i;
  }
}

TEST(GqaAttention, ShardsWithoutHeadsOrTokensDoNothing) {
  const Case no_query_heads{.heads = {0, 2, 16}};
  const Case no_heads{.heads = {0, 0, 16}};
  std::mt19937 random(10);
  for (const Case& setup : {no_query_heads, no_heads}) {
    const History a(setup.heads, 20, random);
    EXPECT_TRUE(Attend(setup, {{&a, 0, 20}}).out.empty());
  }
  EXPECT_TRUE(Attend({}, {}).out.empty());
}

TEST(GqaAttention, RefusesArgumentsByName) {
  std::mt19937 random(11);
  const Case good;
  const History a(good.heads, 20, random);
  Pool pool(good, 10);
  const Call call = MakeCall(good, {{&a, 10, 20}}, pool);
  const auto error = [&](auto spoil) {
    Case setup = good;
    Call bad = call;
    spoil(setup, bad);
    return std::string(RunCall(setup, bad, pool).status().message());
  };
  EXPECT_EQ(error([](Case&, Call&) {}), "");
  EXPECT_THAT(error([](Case& s, Call&) { s.heads.query = 5; }),
              HasSubstr("5 query heads are not a multiple of 2 KV heads"));
  EXPECT_THAT(error([](Case& s, Call&) { s.heads.kv = 0; }), HasSubstr("multiple of 0 KV heads"));
  EXPECT_THAT(error([](Case& s, Call&) { s.window = -1; }), HasSubstr("window -1 is negative"));
  EXPECT_THAT(error([](Case& s, Call&) { s.dtype = DType::kInt8; }),
              HasSubstr("kv.k is int8, not float32, bfloat16 or float16"));
  EXPECT_THAT(error([](Case& s, Call&) { s.dtype = DType::kFloat16; }),
              HasSubstr("kv.k is float16 but kv.v is float32"));
  EXPECT_THAT(error([](Case& s, Call&) { s.page_size = 1000; }), HasSubstr("head stride"));
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
