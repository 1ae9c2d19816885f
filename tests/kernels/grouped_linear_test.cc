// Products of grouped rows: bit for bit those of `linear`, and of the chosen experts' weights
// alone.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gemm/linear_cpu.h"
#include "tests/kernels/test_weight.h"

namespace heddle {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsNan;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Packed weights a whole number of pages apart, each of which can be made unreadable.
class GuardedStack {
 public:
  GuardedStack(const std::vector<TestWeight>& weights, CpuDevice& device) {
    const int64_t bytes = *PackedWeightBytesCpu(weights[0].shape());
    // Kernels may read whole vectors past a weight's end.
    const int64_t page = sysconf(_SC_PAGESIZE), needed = bytes + 128;
    stride_ = (needed + page - 1) / page * page;
    bytes_ = stride_ * static_cast<int64_t>(weights.size());
    data_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(data_, MAP_FAILED);
    for (const TestWeight& weight : weights) {
      packed_.push_back(weight.Pack(device));
      std::memcpy(data_ + stride_ * (packed_.size() - 1), packed_.back().data, bytes);
    }
  }
  GuardedStack(const GuardedStack&) = delete;
  GuardedStack& operator=(const GuardedStack&) = delete;
  ~GuardedStack() { munmap(data_, bytes_); }

  // Touching the weight of `expert` now ends the process.
  void Guard(int64_t expert) {
    ASSERT_EQ(mprotect(data_ + expert * stride_, stride_, PROT_NONE), 0);
  }

  PackedWeightStack stack() const {
    PackedWeight first = packed_[0];
    first.data = data_;
    return {first, stride_, static_cast<int64_t>(packed_.size())};
  }
  // The same weight in memory of its own.
  const PackedWeight& alone(int64_t expert) const { return packed_[expert]; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t stride_ = 0;
  std::vector<PackedWeight> packed_;
};

std::vector<TestWeight> RandomWeights(int64_t count, DType dtype, int64_t n, int64_t k,
                                      int64_t k_offset, std::mt19937& random) {
  std::vector<TestWeight> weights;
  for (int64_t i = 0; i < count; ++i) weights.emplace_back(dtype, n, k, k_offset, random);
  return weights;
}

std::vector<ActivationPrecision> Precisions(DType dtype) {
  if (!IsBlockQuantised(dtype)) return {ActivationPrecision::kFloat32};
  return {ActivationPrecision::kFloat32, ActivationPrecision::kInt8};
}

std::vector<int32_t> StartsOf(const std::vector<int32_t>& counts) {
  std::vector<int32_t> starts = {0};
  for (const int32_t count : counts) starts.push_back(starts.back() + count);
  return starts;
}

// Multiplies with experts that have `counts` entries, of random tokens or, where it is one, of the
// first token; weights of the others are guarded. Compares each row with `linear`.
void ExpectRowsOfLinear(const std::vector<TestWeight>& weights, const std::vector<int32_t>& counts,
                        bool gathers, ActivationPrecision precision, int num_threads,
                        std::mt19937& random) {
  CpuDevice device(num_threads);
  GuardedStack stack(weights, device);
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] == 0) stack.Guard(static_cast<int64_t>(e));
  }
  const std::vector<int32_t> starts = StartsOf(counts);
  constexpr int64_t kSpareRows = 3;
  const int64_t n = weights[0].rows().n, k = weights[0].rows().k;
  const int64_t entries = starts.back(), rows = entries + kSpareRows;
  const int64_t tokens = gathers ? entries / 3 + 1 : rows;
  const int64_t x_stride = k + 3, out_stride = n + 1;
  std::vector<float> x = RandomFloats(tokens * x_stride, random);
  std::vector<float> out(rows * out_stride, kNan);
  std::vector<int32_t> entry_tokens(rows, -1);  // nobody reads the spare rows
  for (int64_t i = 0; i < entries; ++i) entry_tokens[i] = static_cast<int32_t>(random() % tokens);
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] == 1) entry_tokens[starts[e]] = 0;
  }
  const GroupedLinearArgs args = {.x = {x.data(), DType::kFloat32, tokens, k, x_stride},
                                  .entry_tokens = gathers ? entry_tokens.data() : nullptr,
                                  .expert_starts = starts.data(),
                                  .weights = stack.stack(),
                                  .out = {out.data(), DType::kFloat32, rows, n, out_stride},
                                  .precision = precision};
  const absl::Status status = device.kernels().grouped_linear(args, device.stream());
  ASSERT_TRUE(status.ok()) << status;
  device.Synchronize();

  CpuDevice one;
  for (size_t e = 0; e < counts.size(); ++e) {
    for (int64_t i = starts[e]; i < starts[e + 1]; ++i) {
      const float* row = x.data() + (gathers ? entry_tokens[i] : i) * x_stride;
      std::vector<float> expected(n);
      ASSERT_TRUE(LinearCpu({FloatMatrix(row, 1, k), stack.alone(static_cast<int64_t>(e)), nullptr,
                             FloatMatrix(expected.data(), 1, n), precision},
                            one.stream())
                      .ok());
      one.Synchronize();
      ASSERT_EQ(std::memcmp(&out[i * out_stride], expected.data(), n * sizeof(float)), 0)
          << "entry " << i << " of expert " << e;
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    EXPECT_TRUE(std::isnan(out[i * out_stride + n])) << "past row " << i;
  }
  const std::vector<float> spare(out.begin() + entries * out_stride, out.end());
  EXPECT_THAT(spare, Each(IsNan()));
}

TEST(GroupedLinear, ARowHasTheBitsThatLinearGives) {
  std::mt19937 random(1);
  for (const DType dtype : kWeightTypes) {
    for (const ActivationPrecision precision : Precisions(dtype)) {
      const int64_t k_offset = IsQuantised(dtype) ? 5 : 0;
      const std::vector<TestWeight> weights = RandomWeights(9, dtype, 151, 300, k_offset, random);
      for (const int threads : {1, 3}) {
        for (const bool gathers : {false, true}) {
          SCOPED_TRACE(absl::StrCat(DTypeName(dtype), " int8 ",
                                    precision == ActivationPrecision::kInt8, " threads ", threads,
                                    " gathers ", gathers));
          // More rows than a block, around a tile's, one, none.
          ExpectRowsOfLinear(weights, {0, 1, 8, 0, 203, 9, 2, 7, 0}, gathers, precision, threads,
                             random);
        }
      }
    }
  }
}

// As in decoding: each token alone with a few of many experts.
TEST(GroupedLinear, ReadsTheWeightsOfChosenExpertsOnly) {
  std::mt19937 random(2);
  for (const DType dtype : {DType::kBFloat16, DType::kQ4_K}) {
    const std::vector<TestWeight> weights = RandomWeights(16, dtype, 40, 256, 0, random);
    for (int repetition = 0; repetition < 20; ++repetition) {
      std::vector<int32_t> counts(16);
      for (int i = 0; i < 4; ++i) counts[random() % 16] = 1;
      ExpectRowsOfLinear(weights, counts, /*gathers=*/true, ActivationPrecision::kFloat32, 2,
                         random);
    }
  }
}

// Activations of more rows than are packed at a time.
TEST(GroupedLinear, ManyWideRows) {
  std::mt19937 random(3);
  const std::vector<TestWeight> weights = RandomWeights(12, DType::kFloat32, 5, 8000, 0, random);
  ExpectRowsOfLinear(weights, {97, 1, 60, 60, 1, 0, 120, 60, 60, 1, 200, 1}, /*gathers=*/true,
                     ActivationPrecision::kFloat32, 2, random);
}

TEST(GroupedLinear, ZeroSizesAreLegal) {
  CpuDevice device(2);
  const std::vector<float> x(12, 1.0f);
  const std::vector<int32_t> starts = {0, 1, 3}, none = {0, 0, 0};
  for (const DType dtype : kWeightTypes) {
    std::vector<float> out(12, kNan);
    const auto multiply = [&](int64_t rows, int64_t n, int64_t k, int64_t experts,
                              const std::vector<int32_t>& expert_starts) {
      const void* data = n * k * experts == 0 ? nullptr : x.data();
      const absl::Status status = device.kernels().grouped_linear(
          {.x = FloatMatrix(x.data(), rows, k),
           .expert_starts = expert_starts.data(),
           .weights = {{data, dtype, n, k, 0, /*block_columns=*/16}, int64_t{1} << 20, experts},
           .out = FloatMatrix(out.data(), rows, n),
           .precision = Precisions(dtype).back()},
          device.stream());
      EXPECT_TRUE(status.ok()) << status;
      device.Synchronize();
    };
    multiply(4, 0, 3, 2, starts);
    multiply(0, 3, 3, 2, none);
    multiply(4, 3, 3, 2, none);
    multiply(4, 3, 3, 0, none);
    EXPECT_THAT(out, Each(IsNan()));
    multiply(4, 3, 0, 2, starts);
    EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 9), std::vector<float>(9, 0.0f));
    EXPECT_TRUE(std::isnan(out[9]));
  }
}

TEST(GroupedLinear, ReadsItsInputsWhenTheStreamRuns) {
  CpuDevice device(1, CpuStreamMode::kDeferred);
  std::mt19937 random(4);
  const std::vector<TestWeight> weights = RandomWeights(2, DType::kFloat32, 1, 1, 0, random);
  const GuardedStack stack(weights, device);
  std::vector<float> x = {1.0f, 10.0f}, out = {kNan, kNan};
  std::vector<int32_t> tokens = {0, 0}, starts = {0, 0, 0};
  ASSERT_TRUE(device.kernels()
                  .grouped_linear({.x = FloatMatrix(x.data(), 2, 1),
                                   .entry_tokens = tokens.data(),
                                   .expert_starts = starts.data(),
                                   .weights = stack.stack(),
                                   .out = FloatMatrix(out.data(), 2, 1)},
                                  device.stream())
                  .ok());
  tokens = {1, 0};
  starts = {0, 1, 2};
  x = {2.0f, 4.0f};
  EXPECT_THAT(out, Each(IsNan()));
  device.Synchronize();
  EXPECT_THAT(out, ElementsAre(4.0f * weights[0].at(0, 0), 2.0f * weights[1].at(0, 0)));
}

TEST(GroupedLinear, RefusesWrongArguments) {
  CpuDevice device;
  alignas(64) float values[256] = {};
  const std::vector<int32_t> good_starts = {0, 1, 3}, good_tokens = {1, 0, 1};
  const auto error = [&](auto spoil) {
    std::vector<int32_t> starts = good_starts, tokens = good_tokens;
    GroupedLinearArgs args = {.x = FloatMatrix(values, 2, 4),
                              .entry_tokens = tokens.data(),
                              .expert_starts = starts.data(),
                              .weights = {{values, DType::kFloat32, 2, 4, 0}, 512, 2},
                              .out = FloatMatrix(values, 3, 2)};
    spoil(args, starts, tokens);
    absl::Status status = device.kernels().grouped_linear(args, device.stream());
    if (status.ok()) status = device.stream().Synchronize();
    return std::string(status.message());
  };
  using Args = GroupedLinearArgs;
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(error([](Args&, Ints&, Ints&) {}), "");
  EXPECT_THAT(error([&](Args& args, Ints&, Ints&) { args.x = FloatMatrix(values, 2, 5); }),
              HasSubstr("grouped_linear: x is [2, 5], not [2, 4]"));
  EXPECT_THAT(error([&](Args& args, Ints&, Ints&) { args.entry_tokens = nullptr; }),
              HasSubstr("grouped_linear: x is [2, 4], not [3, 4]"));
  EXPECT_THAT(error([&](Args& args, Ints&, Ints&) { args.out = FloatMatrix(values, 3, 3); }),
              HasSubstr("grouped_linear: out is [3, 3], not [3, 2]"));
  EXPECT_THAT(error([](Args& args, Ints&, Ints&) { args.precision = ActivationPrecision::kInt8; }),
              HasSubstr("int8 activations need block-quantised weights, not float32"));
  EXPECT_THAT(error([](Args& args, Ints&, Ints&) { args.weights.first.data = nullptr; }),
              HasSubstr("weights is null"));
  EXPECT_THAT(error([](Args& args, Ints&, Ints&) { args.weights.first.dtype = DType::kInt8; }),
              HasSubstr("cannot be stored as int8"));
  EXPECT_THAT(error([](Args& args, Ints&, Ints&) { args.weights.stride_bytes = 448; }),
              HasSubstr("weights of 512 bytes are 448 bytes apart"));
  EXPECT_THAT(error([](Args& args, Ints&, Ints&) { args.weights.count = -1; }),
              HasSubstr("-1 experts"));
  EXPECT_THAT(error([](Args& args, Ints&, Ints&) { args.expert_starts = nullptr; }),
              HasSubstr("expert_starts is null"));
  EXPECT_THAT(error([](Args&, Ints& starts, Ints&) { starts[0] = 1; }),
              HasSubstr("expert_starts[0] is 1, not in [0, 0]"));
  EXPECT_THAT(error([](Args&, Ints& starts, Ints&) { starts[1] = 4; }),
              HasSubstr("expert_starts[1] is 4, not in [0, 3]"));
  EXPECT_THAT(error([](Args&, Ints& starts, Ints&) { starts[2] = 0; }),
              HasSubstr("expert_starts[2] is 0, not in [1, 3]"));
  for (const int32_t bad : {-1, 2}) {
    EXPECT_THAT(error([bad](Args&, Ints&, Ints& tokens) { tokens[2] = bad; }),
                HasSubstr(absl::StrCat("entry 2 is of token ", bad, " of 2")));
  }
}

}  // namespace
}  // namespace heddle
