// A product for each head, against `linear`, whose bits it promises.
#include "kernels/gemm/head_linear.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gemm/linear.h"
#include "tests/kernels/test_weight.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int64_t heads, n, k;
};

// Weights of `heads` heads side by side, each also packed by itself.
struct Stack {
  Stack(CpuDevice& device, DType dtype, const Shape& shape, std::mt19937& random) {
    PackedWeight first = {nullptr, dtype, shape.n, shape.k, 0, BlockColumns(dtype)};
    const int64_t bytes = *device.kernels().packed_weight_bytes(first);
    const int64_t stride = bytes + 128;
    auto* data = device.Upload(std::vector<std::byte>(shape.heads * stride, std::byte{0xff}));
    first.data = data;
    for (int64_t head = 0; head < shape.heads; ++head) {
      // Blocks of float8 scales are cut anew by each head.
      const TestWeight weight(dtype, shape.n, shape.k, 0, random, {.row_offset = head % 7});
      heads.push_back(weight.Pack(device));
      std::memcpy(data + head * stride, heads.back().data, bytes);
    }
    stack = {first, stride, shape.heads};
  }
  std::vector<PackedWeight> heads;
  PackedWeightStack stack;
};

TEST(HeadLinear, GivesTheBitsOfLinear) {
  std::mt19937 random(1);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3, DType::kQ8_0}) {
    for (const auto& shape :
         {Shape{4, 16, 8}, {3, 8, 16}, {1, 70, 33}, {16, 20, 6}, {2, 512, 128}}) {
      for (const int64_t tokens : {1, 2, 7, 97}) {
        const int64_t k = dtype == DType::kQ8_0 ? (shape.k + 31) / 32 * 32 : shape.k;
        for (const int num_threads : {1, 2}) {
          SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " ", shape.heads, " heads of [",
                                    shape.n, ", ", k, "], ", tokens, " tokens, ", num_threads,
                                    " threads"));
          CpuDevice device(num_threads, CpuStreamMode::kDeferred);
          const Stack weights(device, dtype, {shape.heads, shape.n, k}, random);
          // Token-major inputs with a gap behind each head, head-major outputs.
          const int64_t width = k + 3;
          const float* x = device.Upload(RandomFloats(tokens * shape.heads * width, random));
          const ConstHeadsView x_view(x, tokens, shape.heads, k, shape.heads * width, width);
          std::vector<float> out(tokens * shape.heads * shape.n + 1, kNan);
          const HeadsView out_view = HeadMajor(out.data(), tokens, shape.heads, shape.n);
          ASSERT_TRUE(device.kernels()
                          .head_linear({x_view, weights.stack, out_view}, device.stream())
                          .ok());
          device.Synchronize();
          EXPECT_TRUE(std::isnan(out.back()));
          std::vector<float> expected(tokens * shape.n);
          for (int64_t head = 0; head < shape.heads; ++head) {
            const LinearArgs args = {
                {x_view.At(0, head), DType::kFloat32, tokens, k, shape.heads * width},
                weights.heads[head],
                nullptr,
                FloatMatrix(expected.data(), tokens, shape.n)};
            ASSERT_TRUE(device.kernels().linear(args, device.stream()).ok());
            device.Synchronize();
            ASSERT_EQ(
                std::memcmp(expected.data(), out_view.At(0, head), expected.size() * sizeof(float)),
                0)
                << "head " << head;
          }
        }
      }
    }
  }
}

TEST(HeadLinear, SizesOfZero) {
  CpuDevice device;
  const PackedWeight none = {nullptr, DType::kFloat32, 0, 0, 0};
  const auto run = [&](const ConstHeadsView& x, PackedWeight weight, int64_t heads,
                       const HeadsView& out) {
    EXPECT_TRUE(device.kernels().head_linear({x, {weight, 0, heads}, out}, device.stream()).ok());
    device.Synchronize();
  };
  const float* no_x = nullptr;
  float* no_out = nullptr;
  run(TokenMajor(no_x, 3, 0, 0), none, 0, TokenMajor(no_out, 3, 0, 0));
  run(TokenMajor(no_x, 0, 2, 0), none, 2, TokenMajor(no_out, 0, 2, 0));
  // Without inputs a sum is zero.
  std::vector<float> out(2 * 3 * 5, kNan);
  PackedWeight no_inputs = none;
  no_inputs.n = 5;
  run(TokenMajor(no_x, 2, 3, 0), no_inputs, 3, TokenMajor(out.data(), 2, 3, 5));
  EXPECT_EQ(out, std::vector<float>(2 * 3 * 5, 0.0f));
}

TEST(HeadLinear, RefusesArgumentsByName) {
  CpuDevice device;
  float x[64] = {};
  const HeadLinearArgs good = {.x = TokenMajor(static_cast<const float*>(x), 1, 2, 4),
                               .weights = {{x, DType::kFloat32, 3, 4, 0}, 64, 2},
                               .out = TokenMajor(x + 32, 1, 2, 3)};
  const auto error = [&](auto spoil) {
    HeadLinearArgs args = good;
    spoil(args);
    return std::string(ValidateHeadLinear(args).message());
  };
  EXPECT_EQ(error([](HeadLinearArgs&) {}), "");
  EXPECT_THAT(error([](HeadLinearArgs& a) { a.weights.count = 3; }),
              HasSubstr("head_linear: x is [1, 2, 4], not [1, 3, 4]"));
  EXPECT_THAT(error([](HeadLinearArgs& a) { a.weights.first.n = 5; }),
              HasSubstr("out is [1, 2, 3], not [1, 2, 5]"));
  EXPECT_THAT(error([](HeadLinearArgs& a) { a.weights.stride_bytes = -1; }),
              HasSubstr("-1 bytes apart"));
  EXPECT_THAT(error([](HeadLinearArgs& a) { a.weights.first.data = nullptr; }),
              HasSubstr("weights is null"));
  EXPECT_THAT(error([](HeadLinearArgs& a) { a.x.head_stride = 3; }),
              HasSubstr("rows of x overlap"));
}

}  // namespace
}  // namespace heddle
