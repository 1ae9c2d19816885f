// Norm, rotation, activation, addition and row selection against double precision.
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

namespace heddle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// [rows, cols] with rows `gap` further apart than needed; the gaps hold NaN, and must still do so
// after an op has written the matrix.
class TestMatrix {
 public:
  TestMatrix(CpuDevice& device, int64_t rows, int64_t cols, int64_t gap, std::mt19937& random)
      : before_(rows * (cols + gap), kNan),
        view_{nullptr, DType::kFloat32, rows, cols, cols + gap} {
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<float> values = RandomFloats(cols, random);
      std::copy(values.begin(), values.end(), before_.begin() + row * view_.row_stride);
    }
    view_.data = device.Upload(before_);
  }

  const MatrixView& view() const { return view_; }
  float Before(int64_t row, int64_t col) const { return before_[row * view_.row_stride + col]; }
  float At(int64_t row, int64_t col) const { return view_.Row<float>(row)[col]; }
  std::vector<float> Row(int64_t row) const {
    return {view_.Row<float>(row), view_.Row<float>(row) + view_.cols};
  }
  void ExpectGapsUntouched() const {
    for (int64_t row = 0; row < view_.rows; ++row) {
      for (int64_t col = view_.cols; col < view_.row_stride; ++col) {
        EXPECT_TRUE(std::isnan(At(row, col))) << "row " << row << ", column " << col;
      }
    }
  }

 private:
  std::vector<float> before_;
  MatrixView view_;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Row counts and widths around the vector lengths, and large enough for several threads.
template <typename Body>
void ForShapes(Body body) {
  std::mt19937 random(1);
  for (const int64_t rows : {0, 1, 2, 65}) {
    for (const int64_t cols : {0, 1, 7, 8, 9, 15, 16, 17, 31, 63, 64, 576, 1000}) {
      for (const int64_t gap : {0, 3}) {
        SCOPED_TRACE(absl::StrCat("[", rows, ", ", cols, "] gap ", gap));
        CpuDevice device(2);
        body(device, rows, cols, gap, random);
      }
    }
  }
}

TEST(RmsNorm, MatchesDoublePrecision) {
  ForShapes([](CpuDevice& device, int64_t rows, int64_t cols, int64_t gap, std::mt19937& random) {
    TestMatrix x(device, rows, cols, gap, random), out(device, rows, cols, gap + 1, random);
    const std::vector<float> weight = RandomFloats(cols, random);
    constexpr float kEpsilon = 1e-6f;
    const RmsNormArgs args{x.view(), device.Upload(weight), kEpsilon, out.view()};
    ASSERT_TRUE(device.kernels().rms_norm(args, device.stream()).ok());
    device.Synchronize();
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < cols; ++i) sum += static_cast<double>(x.At(row, i)) * x.At(row, i);
      const double scale = 1.0 / std::sqrt(sum / static_cast<double>(cols) + kEpsilon);
      for (int64_t i = 0; i < cols; ++i) {
        const double expected = x.At(row, i) * scale * weight[i];
        ASSERT_NEAR(out.At(row, i), expected, 2e-6 * std::max(1.0, std::fabs(expected)));
      }
    }
    out.ExpectGapsUntouched();

    // In place, and a row alone: the same bits.
    const RmsNormArgs in_place{x.view(), args.weight, kEpsilon, x.view()};
    ASSERT_TRUE(device.kernels().rms_norm(in_place, device.stream()).ok());
    device.Synchronize();
    for (int64_t row = 0; row < rows; ++row) {
      ASSERT_TRUE(SameBits(x.Row(row), out.Row(row)));
    }
  });
}

TEST(RmsNorm, RefusesArgumentsByName) {
  CpuDevice device;
  float x[8] = {};
  const auto error = [&](const RmsNormArgs& args) {
    return std::string(device.kernels().rms_norm(args, device.stream()).message());
  };
  const MatrixView view = FloatMatrix(x, 2, 4);
  EXPECT_EQ(error({view, x, 1e-5f, view}), "");
  EXPECT_THAT(error({view, nullptr, 1e-5f, view}), HasSubstr("rms_norm: weight is null"));
  EXPECT_THAT(error({view, x, kNan, view}), HasSubstr("epsilon"));
  EXPECT_THAT(error({view, x, 1e-5f, FloatMatrix(x, 1, 4)}),
              HasSubstr("out is [1, 4], not [2, 4]"));
  EXPECT_THAT(error({{x, DType::kBFloat16, 2, 4, 4}, x, 1e-5f, view}),
              HasSubstr("x is bfloat16, not float32"));
  EXPECT_THAT(error({{x, DType::kFloat32, 2, 4, 3}, x, 1e-5f, view}),
              HasSubstr("rows of x overlap: stride 3 for 4 columns"));
  EXPECT_THAT(error({{x, DType::kFloat32, -1, 4, 4}, x, 1e-5f, view}), HasSubstr("[-1, 4]"));
}

TEST(SiluMul, MatchesDoublePrecision) {
  ForShapes([](CpuDevice& device, int64_t rows, int64_t cols, int64_t gap, std::mt19937& random) {
    TestMatrix gate(device, rows, cols, gap, random), up(device, rows, cols, gap + 2, random);
    TestMatrix out(device, rows, cols, gap + 1, random);
    ASSERT_TRUE(
        device.kernels().silu_mul({gate.view(), up.view(), out.view()}, device.stream()).ok());
    device.Synchronize();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < cols; ++i) {
        const double x = gate.At(row, i);
        const double expected = x / (1.0 + std::exp(-x)) * up.At(row, i);
        ASSERT_NEAR(out.At(row, i), expected, 4e-7 * std::max(1.0, std::fabs(expected)));
      }
    }
    out.ExpectGapsUntouched();
    ASSERT_TRUE(
        device.kernels().silu_mul({gate.view(), up.view(), gate.view()}, device.stream()).ok());
    device.Synchronize();
    for (int64_t row = 0; row < rows; ++row) ASSERT_TRUE(SameBits(gate.Row(row), out.Row(row)));
  });
}

TEST(SiluMul, LeavesRowsThatDoNotCountAlone) {
  CpuDevice device;
  std::mt19937 random(7);
  TestMatrix gate(device, 3, 5, 0, random), up(device, 3, 5, 0, random);
  TestMatrix out(device, 3, 5, 0, random);
  int32_t num_rows = 0;
  const SiluMulArgs args{gate.view(), up.view(), out.view(), &num_rows};
  for (const int32_t count : {0, 2}) {
    num_rows = count;
    ASSERT_TRUE(device.kernels().silu_mul(args, device.stream()).ok());
    device.Synchronize();
    for (int64_t row = 0; row < 3; ++row) {
      EXPECT_EQ(out.At(row, 0) != out.Before(row, 0), row < count) << row << " of " << count;
    }
  }
  for (const int32_t bad : {-1, 4}) {
    num_rows = bad;
    ASSERT_TRUE(device.kernels().silu_mul(args, device.stream()).ok());
    EXPECT_THAT(device.stream().Synchronize().message(),
                HasSubstr(absl::StrCat("silu_mul: ", bad, " rows of 3")));
  }
}

// Every finite gate gives a finite result near the exact one; what is not a number stays so.
TEST(SiluMul, CoversTheWholeRange) {
  CpuDevice device;
  std::vector<float> gate;
  for (float x = -110.0f; x < 110.0f; x += 0.0137f) gate.push_back(x);
  for (const float x : {-3e38f, -1e4f, -88.0f, 88.8f, 1e4f, 3e38f, 0.0f, -0.0f, 1e-30f}) {
    gate.push_back(x);
  }
  const auto count = static_cast<int64_t>(gate.size());
  std::vector<float> up(gate.size(), 1.0f);
  const auto run = [&](std::vector<float> values) {
    const int64_t size = static_cast<int64_t>(values.size());
    float* x = device.Upload(values);
    EXPECT_TRUE(device.kernels()
                    .silu_mul({FloatMatrix(x, 1, size), FloatMatrix(up.data(), 1, size),
                               FloatMatrix(x, 1, size)},
                              device.stream())
                    .ok());
    device.Synchronize();
    return std::vector<float>(x, x + size);
  };
  const std::vector<float> out = run(gate);
  for (int64_t i = 0; i < count; ++i) {
    const double x = gate[i];
    const double expected = x / (1.0 + std::exp(-x));
    ASSERT_NEAR(out[i], expected, 1e-36 + 5e-7 * std::fabs(expected)) << "silu(" << x << ")";
  }
  const std::vector<float> special = run({kNan, kInfinity});
  EXPECT_TRUE(std::isnan(special[0]));
  EXPECT_EQ(special[1], kInfinity);
}

TEST(Add, AddsExactly) {
  ForShapes([](CpuDevice& device, int64_t rows, int64_t cols, int64_t gap, std::mt19937& random) {
    TestMatrix x(device, rows, cols, gap, random), target(device, rows, cols, gap + 1, random);
    ASSERT_TRUE(device.kernels().add({x.view(), target.view()}, device.stream()).ok());
    device.Synchronize();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < cols; ++i) {
        ASSERT_EQ(target.At(row, i), target.Before(row, i) + x.At(row, i));
      }
    }
    target.ExpectGapsUntouched();
  });
}

TEST(Add, RefusesOtherShapes) {
  CpuDevice device;
  float x[8] = {};
  const AddArgs args{FloatMatrix(x, 2, 4), FloatMatrix(x, 4, 2)};
  EXPECT_THAT(device.kernels().add(args, device.stream()).message(),
              HasSubstr("add: target is [4, 2], not [2, 4]"));
}

TEST(GatherRows, PicksRowsInAnyOrder) {
  CpuDevice device;
  std::mt19937 random(2);
  TestMatrix x(device, 5, 7, 2, random), out(device, 4, 7, 1, random);
  const std::vector<int32_t> rows = {4, 0, 4, 2};
  ASSERT_TRUE(device.kernels()
                  .gather_rows({x.view(), device.Upload(rows), out.view()}, device.stream())
                  .ok());
  device.Synchronize();
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(out.Row(i), x.Row(rows[i]));
  out.ExpectGapsUntouched();

  TestMatrix none(device, 0, 7, 0, random);
  EXPECT_TRUE(device.kernels().gather_rows({x.view(), nullptr, none.view()}, device.stream()).ok());
  device.Synchronize();
}

TEST(GatherRows, RefusesARowOutsideX) {
  CpuDevice device;
  std::mt19937 random(3);
  TestMatrix x(device, 5, 7, 0, random), out(device, 2, 7, 0, random);
  for (const int32_t bad : {-1, 5}) {
    const std::vector<int32_t> rows = {0, bad};
    ASSERT_TRUE(device.kernels()
                    .gather_rows({x.view(), device.Upload(rows), out.view()}, device.stream())
                    .ok());
    EXPECT_THAT(device.stream().Synchronize().message(),
                HasSubstr(absl::StrCat("index 1 asks for row ", bad, " of 5")));
  }
}

std::vector<float> CosSinTable(int64_t num_positions, int64_t rotary_dim, double theta) {
  std::vector<float> table;
  for (int64_t position = 0; position < num_positions; ++position) {
    for (const bool sine : {false, true}) {
      for (int64_t i = 0; i < rotary_dim / 2; ++i) {
        const double angle = static_cast<double>(position) *
                             std::pow(theta, -2.0 * static_cast<double>(i) / rotary_dim);
        table.push_back(static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
      }
    }
  }
  return table;
}

TEST(Rope, MatchesDoublePrecision) {
  struct Shape {
    int64_t heads, head_dim, rotary_dim;
  };
  constexpr int64_t kPositions = 50;
  std::mt19937 random(4);
  for (const auto& [heads, head_dim, rotary_dim] : {Shape{1, 2, 2},
                                                    {3, 8, 8},
                                                    {2, 64, 64},
                                                    {4, 80, 80},
                                                    {2, 24, 8},
                                                    {4, 12, 4},
                                                    {1, 20, 4},
                                                    {3, 10, 0},
                                                    {0, 8, 8}}) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t tokens : {0, 1, 130}) {
        SCOPED_TRACE(absl::StrCat(heads, "x", head_dim, " rotary ", rotary_dim, " interleaved ",
                                  interleaved, " tokens ", tokens));
        CpuDevice device(2);
        TestMatrix x(device, tokens, heads * head_dim, 3, random);
        const std::vector<float> table = CosSinTable(kPositions, rotary_dim, 10000.0);
        std::vector<int32_t> positions(tokens);
        for (int32_t& position : positions) position = static_cast<int32_t>(random() % kPositions);
        RopeArgs args;
        args.x = x.view();
        args.num_heads = heads;
        args.head_dim = head_dim;
        args.rotary_dim = rotary_dim;
        args.interleaved = interleaved;
        args.cos_sin = device.Upload(table);
        args.num_positions = kPositions;
        args.positions = device.Upload(positions);
        ASSERT_TRUE(device.kernels().rope(args, device.stream()).ok());
        device.Synchronize();
        const int64_t half = rotary_dim / 2, kept = head_dim - rotary_dim;
        for (int64_t token = 0; token < tokens; ++token) {
          for (int64_t head = 0; head < heads; ++head) {
            const int64_t base = head * head_dim;
            for (int64_t i = 0; i < kept; ++i) {
              ASSERT_EQ(x.At(token, base + i), x.Before(token, base + i));
            }
            for (int64_t i = 0; i < half; ++i) {
              const int64_t first = base + kept + (interleaved ? 2 * i : i);
              const int64_t second = interleaved ? first + 1 : first + half;
              const double cosine = table[positions[token] * rotary_dim + i];
              const double sine = table[positions[token] * rotary_dim + half + i];
              const double a = x.Before(token, first), b = x.Before(token, second);
              ASSERT_NEAR(x.At(token, first), a * cosine - b * sine, 1e-6);
              ASSERT_NEAR(x.At(token, second), b * cosine + a * sine, 1e-6);
            }
          }
        }
        x.ExpectGapsUntouched();
      }
    }
  }
}

TEST(Rope, RefusesArgumentsByName) {
  CpuDevice device;
  float x[16] = {};
  const int32_t position = 0;
  const RopeArgs good{FloatMatrix(x, 1, 16), 2, 8, 8, false, x, 2, &position};
  const auto error = [&](auto spoil) {
    RopeArgs args = good;
    spoil(args);
    absl::Status status = device.kernels().rope(args, device.stream());
    if (status.ok()) status = device.stream().Synchronize();
    return std::string(status.message());
  };
  EXPECT_EQ(error([](RopeArgs&) {}), "");
  EXPECT_THAT(error([](RopeArgs& a) { a.rotary_dim = 7; }), HasSubstr("rotary_dim 7"));
  EXPECT_THAT(error([](RopeArgs& a) { a.rotary_dim = 10; }), HasSubstr("within head_dim 8"));
  EXPECT_THAT(error([](RopeArgs& a) { a.num_heads = 3; }), HasSubstr("[1, 16], not [1, 24]"));
  EXPECT_THAT(error([](RopeArgs& a) { a.cos_sin = nullptr; }), HasSubstr("cos_sin is null"));
  EXPECT_THAT(error([](RopeArgs& a) { a.positions = nullptr; }), HasSubstr("positions is null"));
  const int32_t far = 2;
  EXPECT_THAT(error([&](RopeArgs& a) { a.positions = &far; }),
              HasSubstr("token 0 has position 2 of 2"));
}

TEST(CopyHeads, PacksAndUnpacks) {
  std::mt19937 random(6);
  constexpr int64_t kTokens = 70, kHeads = 3, kDim = 5;
  CpuDevice device(2);
  const std::vector<float> values = RandomFloats(kTokens * kHeads * (kDim + 2), random);
  // The last elements of wider heads, packed by head, and back to the heads they came from.
  float* wide = device.Upload(values);
  const HeadsView tails = {wide + 2, kTokens, kHeads, kDim, kHeads * (kDim + 2), kDim + 2};
  float* packed = device.Upload(std::vector<float>(kTokens * kHeads * kDim, kNan));
  const HeadsView by_head = HeadMajor(packed, kTokens, kHeads, kDim);
  ASSERT_TRUE(device.kernels().copy_heads({tails, by_head}, device.stream()).ok());
  device.Synchronize();
  for (int64_t head = 0; head < kHeads; ++head) {
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t i = 0; i < kDim; ++i) {
        float& element = packed[(head * kTokens + token) * kDim + i];
        ASSERT_EQ(element, values[(token * kHeads + head) * (kDim + 2) + 2 + i]);
        element += 1.0f;
      }
    }
  }
  ASSERT_TRUE(device.kernels().copy_heads({by_head, tails}, device.stream()).ok());
  device.Synchronize();
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(wide[i], i % (kDim + 2) < 2 ? values[i] : values[i] + 1.0f) << i;
  }

  CopyHeadsArgs args{by_head, tails};
  args.out.heads = 2;
  EXPECT_THAT(device.kernels().copy_heads(args, device.stream()).message(),
              HasSubstr("copy_heads: out is [70, 2, 5], not [70, 3, 5]"));
  args.out = tails;
  args.out.token_stride = 1;
  EXPECT_THAT(device.kernels().copy_heads(args, device.stream()).message(),
              HasSubstr("rows of out overlap: strides 1 and 7"));
}

// Row ops on a deferred stream read their inputs at Synchronize.
TEST(RowOps, RunOnADeferredStream) {
  CpuDevice device(1, CpuStreamMode::kDeferred);
  float* x = device.Upload(std::vector<float>{1, 2});
  float* y = device.Upload(std::vector<float>{10, 20});
  const AddArgs args{FloatMatrix(x, 1, 2), FloatMatrix(y, 1, 2)};
  ASSERT_TRUE(device.kernels().add(args, device.stream()).ok());
  x[0] = 5;
  EXPECT_EQ(y[0], 10);
  device.Synchronize();
  EXPECT_THAT(std::vector<float>(y, y + 2), ElementsAre(15, 22));
}

}  // namespace
}  // namespace heddle
