// The mixture-of-experts block against double precision, whole and as the sum of uneven shards.
#include "runtime/model/moe_ffn.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/kernels/exact_router.h"
#include "tests/kernels/test_weight.h"

namespace heddle {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kMinMargin = 1e-5;  // between scores; below, float32 may choose other experts

// A block's shape, with as many ids and columns as its ranges hold.
struct Share {
  Range experts;
  Range columns;  // of each expert
  Range shared_columns;
};

// out = down (silu(gate x) * up x)
struct TestFfn {
  TestFfn(DType dtype, int64_t hidden, int64_t columns, std::mt19937& random)
      : gate(dtype, columns, hidden, 0, random),
        up(dtype, columns, hidden, 0, random),
        down(dtype, hidden, columns, 0, random) {}

  // out += weight * ffn(x)
  void AddExactly(const float* x, double weight, std::vector<double>& out) const {
    const int64_t columns = gate.rows().n, hidden = gate.rows().k;
    std::vector<double> activations(columns);
    for (int64_t c = 0; c < columns; ++c) {
      double g = 0, u = 0;
      for (int64_t i = 0; i < hidden; ++i) {
        g += static_cast<double>(x[i]) * gate.at(c, i);
        u += static_cast<double>(x[i]) * up.at(c, i);
      }
      activations[c] = g / (1 + std::exp(-g)) * u;
    }
    for (int64_t i = 0; i < hidden; ++i) {
      for (int64_t c = 0; c < columns; ++c) out[i] += weight * activations[c] * down.at(i, c);
    }
  }

  TestWeight gate, up, down;
};

// Rows and columns of a weight, as a loader would cut them.
WeightRows Cut(const WeightRows& whole, Range rows, Range cols) {
  const int64_t block = BlockElements(whole.dtype);
  WeightRows cut = whole;
  cut.data += rows.begin * whole.row_stride_bytes + cols.begin / block * BlockBytes(whole.dtype);
  cut.n = rows.size();
  cut.k = cols.size();
  cut.k_offset = cols.begin % block;
  return cut;
}

PackedWeightStack PackStack(const std::vector<WeightRows>& rows, WeightRows shape,
                            CpuDevice& device) {
  PackedWeight first = {nullptr, shape.dtype, shape.n, shape.k, shape.k_offset};
  const int64_t bytes = *device.kernels().packed_weight_bytes(first);
  first.data = device.Upload(std::vector<std::byte>(bytes * rows.size(), std::byte{0xff}));
  const PackedWeightStack stack = {first, bytes, static_cast<int64_t>(rows.size())};
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_TRUE(device.kernels()
                    .pack_weight(rows[i], stack.at(static_cast<int64_t>(i)), device.stream())
                    .ok());
    device.Synchronize();
  }
  return stack;
}

PackedWeight Pack(const WeightRows& rows, CpuDevice& device) {
  return PackStack({rows}, rows, device).at(0);
}

class TestMoe {
 public:
  TestMoe(const MoeSpec& spec, int64_t hidden, DType dtype, std::mt19937& random)
      : spec_(spec),
        hidden_(hidden),
        router_(DType::kFloat32, spec.num_experts, hidden, 0, random),
        shared_(dtype, hidden, spec.shared_intermediate_size, random) {
    for (int64_t e = 0; e < spec.num_experts; ++e) {
      experts_.emplace_back(dtype, hidden, spec.expert_intermediate_size, random);
    }
    if (spec.correction_bias) bias_ = RandomFloats(spec.num_experts, random, 0.1f);
  }

  const MoeSpec& spec() const { return spec_; }
  int64_t hidden() const { return hidden_; }
  Share Whole() const {
    return {{0, spec_.num_experts},
            {0, spec_.expert_intermediate_size},
            {0, spec_.shared_intermediate_size}};
  }

  // [tokens, hidden]; NaN for tokens whose choice is too close.
  std::vector<double> Exact(const std::vector<float>& x) const {
    const RouterRules rules = {.experts = spec_.num_experts,
                               .top_k = spec_.num_experts_per_token,
                               .score = spec_.score,
                               .num_groups = spec_.num_groups,
                               .num_top_groups = spec_.num_top_groups,
                               .group_score = spec_.group_score,
                               .normalise = spec_.normalise_weights,
                               .factor = spec_.routed_scaling_factor};
    std::vector<double> result;
    for (size_t first = 0; first < x.size(); first += hidden_) {
      std::vector<double> logits(spec_.num_experts), out(hidden_);
      for (int64_t e = 0; e < spec_.num_experts; ++e) {
        for (int64_t i = 0; i < hidden_; ++i) {
          logits[e] += static_cast<double>(x[first + i]) * router_.at(e, i);
        }
      }
      const ExactRouting routing = RouteExactly(rules, logits.data(), bias_);
      if (routing.margin < kMinMargin) {
        result.insert(result.end(), hidden_, kNan);
        continue;
      }
      shared_.AddExactly(&x[first], 1.0, out);
      for (size_t j = 0; j < routing.ids.size(); ++j) {
        experts_[routing.ids[j]].AddExactly(&x[first], routing.weights[j], out);
      }
      result.insert(result.end(), out.begin(), out.end());
    }
    return result;
  }

  // The summand of a rank that holds `share`, [tokens, hidden].
  std::vector<float> Run(const Share& share, const std::vector<float>& x,
                         CpuStreamMode mode = CpuStreamMode::kImmediate,
                         int num_threads = 1) const {
    CpuDevice device(num_threads, mode);
    const MoeWeights weights = Load(share, device);
    const auto tokens = static_cast<int64_t>(x.size()) / hidden_;
    const StepLimits limits = {.max_tokens = tokens};
    auto dense = DenseFfnBlock::Create(share.shared_columns.size(), limits,
                                       ActivationPrecision::kFloat32, device.backend());
    auto moe = MoeFfnBlock::Create(spec_, hidden_, share.columns.size(), limits,
                                   ActivationPrecision::kFloat32, device.backend());
    EXPECT_TRUE(dense.ok() && moe.ok());
    float* x_device = device.Upload(std::vector<float>(x.size(), kNan));
    float* out = device.Upload(std::vector<float>(x.size(), kNan));
    if (mode == CpuStreamMode::kImmediate) std::copy(x.begin(), x.end(), x_device);
    const absl::Status status =
        moe->Forward(weights, *dense, FloatMatrix(x_device, tokens, hidden_),
                     FloatMatrix(out, tokens, hidden_), device.stream());
    EXPECT_TRUE(status.ok()) << status;
    std::copy(x.begin(), x.end(), x_device);
    device.Synchronize();
    return {out, out + x.size()};
  }

 private:
  MoeWeights Load(const Share& share, CpuDevice& device) const {
    const Range all = {0, hidden_};
    std::vector<WeightRows> gate, up, down;
    for (int64_t e = share.experts.begin; e < share.experts.end; ++e) {
      gate.push_back(Cut(experts_[e].gate.rows(), share.columns, all));
      up.push_back(Cut(experts_[e].up.rows(), share.columns, all));
      down.push_back(Cut(experts_[e].down.rows(), all, share.columns));
    }
    MoeWeights weights;
    weights.router = Pack(router_.rows(), device);
    if (!bias_.empty()) weights.correction_bias = device.Upload(bias_);
    weights.experts = share.experts;
    weights.gate = PackStack(gate, Cut(experts_[0].gate.rows(), share.columns, all), device);
    weights.up = PackStack(up, Cut(experts_[0].up.rows(), share.columns, all), device);
    weights.down = PackStack(down, Cut(experts_[0].down.rows(), all, share.columns), device);
    if (spec_.shared_intermediate_size > 0) {
      const Range columns = share.shared_columns;
      weights.shared.gate.weight = Pack(Cut(shared_.gate.rows(), columns, all), device);
      weights.shared.up.weight = Pack(Cut(shared_.up.rows(), columns, all), device);
      weights.shared.down.weight = Pack(Cut(shared_.down.rows(), all, columns), device);
    }
    return weights;
  }

  const MoeSpec spec_;
  const int64_t hidden_;
  TestWeight router_;
  TestFfn shared_;
  std::vector<TestFfn> experts_;
  std::vector<float> bias_;
};

MoeSpec MixtralLike() {
  MoeSpec spec;
  spec.num_experts = 8;
  spec.num_experts_per_token = 2;
  spec.expert_intermediate_size = 72;
  spec.normalise_weights = true;
  return spec;
}

MoeSpec DeepSeekV2Like() {
  MoeSpec spec;
  spec.num_experts = 12;
  spec.num_experts_per_token = 3;
  spec.expert_intermediate_size = 40;
  spec.shared_intermediate_size = 80;
  spec.num_groups = 4;
  spec.num_top_groups = 2;
  spec.routed_scaling_factor = 4.0;
  return spec;
}

MoeSpec DeepSeekV3Like() {
  MoeSpec spec;
  spec.num_experts = 8;
  spec.num_experts_per_token = 3;
  spec.expert_intermediate_size = 96;
  spec.shared_intermediate_size = 33;
  spec.score = RouterScore::kSigmoid;
  spec.correction_bias = true;
  spec.num_groups = 4;
  spec.num_top_groups = 2;
  spec.group_score = GroupScore::kTopTwoSum;
  spec.normalise_weights = true;
  spec.routed_scaling_factor = 2.5;
  return spec;
}

std::vector<MoeSpec> AllSpecs() { return {MixtralLike(), DeepSeekV2Like(), DeepSeekV3Like()}; }

// The ranks' summands add up to the exact result, within 1e-5 of its largest value.
void ExpectSum(const TestMoe& moe, const std::vector<float>& x, const std::vector<Share>& shares) {
  const std::vector<double> exact = moe.Exact(x);
  std::vector<double> sum(exact.size());
  for (const Share& share : shares) {
    const std::vector<float> part = moe.Run(share, x);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  double largest = 0;
  size_t compared = 0;
  for (const double value : exact) {
    if (!std::isnan(value)) largest = std::max(largest, std::fabs(value));
  }
  for (size_t i = 0; i < exact.size(); ++i) {
    if (std::isnan(exact[i])) continue;
    ++compared;
    ASSERT_NEAR(sum[i], exact[i], 1e-5 * largest) << i;
  }
  EXPECT_GT(largest, 0);
  EXPECT_GE(compared, exact.size() * 95 / 100);
}

TEST(MoeFfn, AgreesWithDoublePrecision) {
  std::mt19937 random(1);
  for (const MoeSpec& spec : AllSpecs()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kQ8_0, DType::kQ4_K}) {
      SCOPED_TRACE(absl::StrCat(spec.num_experts, " experts of ", DTypeName(dtype)));
      const TestMoe moe(spec, 56, dtype, random);
      for (const int64_t tokens : {1, 37}) {
        ExpectSum(moe, RandomFloats(tokens * 56, random), {moe.Whole()});
      }
    }
  }
}

// Columns of every expert, in uneven ranges that cut quantisation blocks; one of them is empty.
TEST(MoeFfn, ColumnsOverRanksAddUp) {
  std::mt19937 random(2);
  for (const MoeSpec& spec : AllSpecs()) {
    for (const DType dtype : {DType::kFloat32, DType::kQ8_0}) {
      SCOPED_TRACE(absl::StrCat(spec.num_experts, " experts of ", DTypeName(dtype)));
      const TestMoe moe(spec, 64, dtype, random);
      const Share whole = moe.Whole();
      const auto cut = [&](double from, double to) {
        const auto part = [&](Range range) {
          return Range{std::lround(range.end * from), std::lround(range.end * to)};
        };
        return Share{whole.experts, part(whole.columns), part(whole.shared_columns)};
      };
      const std::vector<float> x = RandomFloats(23 * 64, random);
      ExpectSum(moe, x, {cut(0, 0.6), cut(0.6, 1)});
      ExpectSum(moe, x, {cut(0, 0.45), cut(0.45, 0.45), cut(0.45, 1)});
    }
  }
}

// Whole experts, as many as do not divide by the ranks (8 on 3) or one rank has none.
TEST(MoeFfn, ExpertsOverRanksAddUp) {
  std::mt19937 random(3);
  for (const MoeSpec& spec : AllSpecs()) {
    SCOPED_TRACE(absl::StrCat(spec.num_experts, " experts"));
    const TestMoe moe(spec, 48, DType::kFloat32, random);
    const Share whole = moe.Whole();
    const int64_t experts = spec.num_experts, shared = spec.shared_intermediate_size;
    const auto held = [&](int64_t begin, int64_t end, Range shared_columns) {
      return Share{{begin, end}, whole.columns, shared_columns};
    };
    const std::vector<float> x = RandomFloats(23 * 48, random);
    ExpectSum(moe, x, {held(0, 3, {0, shared / 2}), held(3, experts, {shared / 2, shared})});
    ExpectSum(moe, x,
              {held(0, 3, {0, shared}), held(3, 6, {shared, shared}),
               held(6, experts, {shared, shared})});
    ExpectSum(moe, x,
              {held(0, 0, {0, 0}), held(0, 1, {0, shared}), held(1, experts, {shared, shared})});
  }
}

TEST(MoeFfn, RoutedOutputIsLinearInTheScalingFactor) {
  for (MoeSpec spec : AllSpecs()) {
    spec.shared_intermediate_size = 0;
    std::vector<std::vector<float>> outs;
    for (const double factor : {1.0, 2.5}) {
      spec.routed_scaling_factor = factor;
      std::mt19937 random(4);
      const TestMoe moe(spec, 32, DType::kFloat32, random);
      outs.push_back(moe.Run(moe.Whole(), RandomFloats(5 * 32, random)));
    }
    for (size_t i = 0; i < outs[0].size(); ++i) {
      EXPECT_NEAR(outs[1][i], 2.5 * outs[0][i], 1e-5 * std::fabs(outs[1][i]) + 1e-7);
    }
  }
}

// More tokens than a piece holds: a token's bits depend on neither its place, batch nor threads,
// nor on when the stream runs.
TEST(MoeFfn, ATokensBitsDependOnNeitherBatchNorThreads) {
  std::mt19937 random(5);
  MoeSpec spec = DeepSeekV3Like();
  spec.expert_intermediate_size = 16;
  const int64_t hidden = 16, tokens = 2100;
  const TestMoe moe(spec, hidden, DType::kFloat32, random);
  const std::vector<float> x = RandomFloats(tokens * hidden, random);
  const std::vector<float> all = moe.Run(moe.Whole(), x);
  for (const int64_t token : {int64_t{0}, int64_t{1023}, int64_t{1024}, tokens - 1}) {
    const std::vector<float> alone =
        moe.Run(moe.Whole(), {x.begin() + token * hidden, x.begin() + (token + 1) * hidden});
    EXPECT_EQ(std::memcmp(&all[token * hidden], alone.data(), hidden * sizeof(float)), 0);
  }
  EXPECT_EQ(moe.Run(moe.Whole(), x, CpuStreamMode::kImmediate, 3), all);
  EXPECT_EQ(moe.Run(moe.Whole(), x, CpuStreamMode::kDeferred), all);
}

TEST(MoeFfn, ABadTokenFailsAlone) {
  std::mt19937 random(6);
  for (const MoeSpec& spec : AllSpecs()) {
    const int64_t hidden = 32;
    const TestMoe moe(spec, hidden, DType::kFloat32, random);
    std::vector<float> x = RandomFloats(3 * hidden, random);
    const std::vector<float> clean = moe.Run(moe.Whole(), x);
    x[hidden + 7] = kNan;
    const std::vector<float> out = moe.Run(moe.Whole(), x);
    for (int64_t i = 0; i < 3 * hidden; ++i) {
      if (i / hidden == 1) {
        EXPECT_TRUE(std::isnan(out[i]));
      } else {
        EXPECT_EQ(out[i], clean[i]);
      }
    }
  }
}

}  // namespace
}  // namespace heddle
