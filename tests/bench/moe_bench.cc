// A mixture of experts of DeepSeek-V2-Lite's size. Its products are compared with `linear` on the
// same weights: experts one behind the other are, packed, one weight of all their rows. The whole
// block, from router to sum, is compared with the time that reading its weights takes.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/backend_registry.h"
#include "kernels/base/logging.h"
#include "kernels/kernel_table.h"
#include "runtime/model/moe_ffn.h"
#include "tests/bench/machine.h"

namespace heddle {
namespace {

constexpr int kRepetitions = 9;
constexpr int64_t kExperts = 64, kTopK = 6;
constexpr int64_t kHidden = 2048, kColumns = 1408, kSharedColumns = 2 * kColumns;

// Weights [n, k] with the same arbitrary values, `count` of them one behind the other.
class Weights {
 public:
  Weights(Backend& backend, Stream& stream, DType dtype, int64_t n, int64_t k, int64_t count) {
    const KernelTable& kernels = backend.kernels();
    const int64_t row_bytes = *RowBytes(dtype, k);
    std::vector<std::byte> rows(n * row_bytes);
    std::mt19937 random(1);
    // Moderate floats and scales of every type: no NaN, and no denormals, which some machines are
    // slow with.
    for (std::byte& byte : rows) byte = static_cast<std::byte>(0x38 + random() % 7);
    const int64_t bytes = *kernels.packed_weight_bytes({nullptr, dtype, n, k, 0});
    buffer_ = *backend.Allocate(count * bytes);
    stack_ = {{buffer_.data(), dtype, n, k, 0}, bytes, count};
    CHECK_OK(kernels.pack_weight({rows.data(), dtype, row_bytes, n, k, 0}, stack_.first, stream));
    CHECK_OK(stream.Synchronize());
    for (int64_t i = 1; i < count; ++i) {
      std::memcpy(buffer_.as<std::byte>() + i * bytes, buffer_.data(), bytes);
    }
  }

  const PackedWeightStack& stack() const { return stack_; }
  double bytes_of_one() const { return static_cast<double>(stack_.stride_bytes); }

 private:
  DeviceBuffer buffer_;
  PackedWeightStack stack_;
};

class ProductBench {
 public:
  explicit ProductBench(DType dtype)
      : dtype_(dtype),
        precision_(IsBlockQuantised(dtype) ? ActivationPrecision::kInt8
                                           : ActivationPrecision::kFloat32),
        backend_(*CreateBackend({.cpu = {.num_threads = BenchThreads()}})),
        stream_(*backend_->CreateStream()),
        machine_(*backend_, *stream_),
        weights_(*backend_, *stream_, dtype, kColumns, kHidden, kExperts) {}

  // One token a step, each with other experts than the last.
  void Decode(double asked) {
    const std::vector<int32_t> counts(kTopK, 1);
    Compare("batch_1_top_6_of_64", counts, 1, asked);
  }

  // As many tokens for each expert.
  void Batch(int32_t rows, double asked) {
    Compare(absl::StrCat("batch_", rows * kExperts / kTopK, "_top_6_of_64"),
            std::vector<int32_t>(kExperts, rows), rows, asked);
  }

  // An expert with half of all rows, others with few or none: against as many rows of `linear`
  // as give the same multiply-adds.
  void Uneven(double asked) {
    std::vector<int32_t> counts(kExperts);
    for (int64_t e = 0; e < kExperts; ++e) counts[e] = static_cast<int32_t>(e % 13);
    counts[20] = std::accumulate(counts.begin(), counts.end(), 0);
    const int32_t rows = std::accumulate(counts.begin(), counts.end(), 0);
    Compare("uneven_64", counts, (rows + kExperts / 2) / kExperts, asked);
  }

 private:
  // `linear` with `linear_rows` rows against experts with `counts` rows, as many experts of the
  // stack at a time as there are counts.
  void Compare(const std::string& name, const std::vector<int32_t>& counts, int64_t linear_rows,
               double asked) {
    const auto experts = static_cast<int64_t>(counts.size());
    std::vector<int32_t> starts = {0};
    for (const int32_t count : counts) starts.push_back(starts.back() + count);
    const int64_t entries = starts.back();
    std::vector<int32_t> tokens(entries);
    for (int64_t i = 0; i < entries; ++i) tokens[i] = static_cast<int32_t>(i / kTopK);
    const std::vector<float> x(entries * kHidden, 0.5f);
    std::vector<float> out(entries * kColumns), linear_out(linear_rows * experts * kColumns);
    const KernelTable& kernels = backend_->kernels();
    const PackedWeightStack& stack = weights_.stack();
    machine_.Wake();
    const double ratio = Median(kRepetitions, [&] {
      double linear = 0, grouped = 0;
      for (int64_t first = 0; first + experts <= kExperts; first += experts) {
        PackedWeight whole = stack.at(first);
        whole.n = experts * kColumns;
        linear += Seconds([&] {
          CHECK_OK(
              kernels.linear({FloatMatrix(x.data(), linear_rows, kHidden), whole, nullptr,
                              FloatMatrix(linear_out.data(), linear_rows, whole.n), precision_},
                             *stream_));
        });
      }
      for (int64_t first = 0; first + experts <= kExperts; first += experts) {
        grouped += Seconds([&] {
          CHECK_OK(
              kernels.grouped_linear({.x = FloatMatrix(x.data(), entries, kHidden),
                                      .entry_tokens = tokens.data(),
                                      .expert_starts = starts.data(),
                                      .weights = {stack.at(first), stack.stride_bytes, experts},
                                      .out = FloatMatrix(out.data(), entries, kColumns),
                                      .precision = precision_},
                                     *stream_));
        });
      }
      return linear / grouped;
    });
    PrintRatio(absl::StrCat("moe_", DTypeName(dtype_), "_", name, "_against_linear"), ratio, asked);
  }

  const DType dtype_;
  const ActivationPrecision precision_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  Machine machine_;
  Weights weights_;
};

class BlockBench {
 public:
  BlockBench()
      : backend_(*CreateBackend({.cpu = {.num_threads = BenchThreads()}})),
        stream_(*backend_->CreateStream()),
        machine_(*backend_, *stream_),
        gate_(*backend_, *stream_, kType, kColumns, kHidden, kExperts),
        up_(*backend_, *stream_, kType, kColumns, kHidden, kExperts),
        down_(*backend_, *stream_, kType, kHidden, kColumns, kExperts),
        shared_gate_(*backend_, *stream_, kType, kSharedColumns, kHidden, 1),
        shared_up_(*backend_, *stream_, kType, kSharedColumns, kHidden, 1),
        shared_down_(*backend_, *stream_, kType, kHidden, kSharedColumns, 1),
        router_(RandomRouter()) {}

  // Share of the read bandwidth at one token, of whose weights each is read once.
  void Bandwidth(double asked) {
    const double experts = gate_.bytes_of_one() + up_.bytes_of_one() + down_.bytes_of_one();
    const double shared =
        shared_gate_.bytes_of_one() + shared_up_.bytes_of_one() + shared_down_.bytes_of_one();
    machine_.Wake();
    const double ratio = Median(kRepetitions, [&] {
      const double bandwidth = machine_.ReadBytesPerSecond();
      return (kTopK * experts + shared) / SecondsPerStep(1) / bandwidth;
    });
    PrintRatio(absl::StrCat("moe_block_", DTypeName(kType), "_batch_1_of_bandwidth"), ratio, asked);
  }

  // Share of the peak of multiply-adds.
  void Peak(int64_t tokens, double asked) {
    const double operations =
        2.0 * static_cast<double>(tokens * 3 * kHidden * (kTopK * kColumns + kSharedColumns));
    machine_.Wake();
    const double ratio = Median(kRepetitions, [&] {
      const double peak = machine_.FlopsPerSecond();
      return operations / SecondsPerStep(tokens) / peak;
    });
    PrintRatio(absl::StrCat("moe_block_", DTypeName(kType), "_batch_", tokens, "_of_peak"), ratio,
               asked);
  }

 private:
  static constexpr DType kType = DType::kBFloat16;

  // Of `tokens` tokens, which choose other experts in each step.
  double SecondsPerStep(int64_t tokens) {
    const auto shared = [](const Weights& weights) {
      return Projection{.weight = weights.stack().first, .bias = nullptr};
    };
    const MoeWeights weights = {
        .router = {router_.data(), DType::kFloat32, kExperts, kHidden, 0},
        .experts = {0, kExperts},
        .gate = gate_.stack(),
        .up = up_.stack(),
        .down = down_.stack(),
        .shared = {shared(shared_gate_), shared(shared_up_), shared(shared_down_)}};
    MoeSpec spec;
    spec.num_experts = kExperts;
    spec.num_experts_per_token = kTopK;
    spec.expert_intermediate_size = kColumns;
    spec.shared_intermediate_size = kSharedColumns;
    const StepLimits limits = {.max_tokens = tokens};
    constexpr ActivationPrecision kPrecision = ActivationPrecision::kFloat32;
    DenseFfnBlock ffn = *DenseFfnBlock::Create(kSharedColumns, limits, kPrecision, *backend_);
    MoeFfnBlock moe = *MoeFfnBlock::Create(spec, kHidden, kColumns, limits, kPrecision, *backend_);
    constexpr int kSteps = 8;
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    std::vector<float> x(kSteps * tokens * kHidden), out(tokens * kHidden);
    for (float& value : x) value = normal(random);
    machine_.Wake();
    return Seconds([&] {
             for (int step = 0; step < kSteps; ++step) {
               const float* first = x.data() + step * tokens * kHidden;
               CHECK_OK(moe.Forward(weights, ffn, FloatMatrix(first, tokens, kHidden),
                                    FloatMatrix(out.data(), tokens, kHidden), *stream_));
             }
             CHECK_OK(stream_->Synchronize());
           }) /
           kSteps;
  }

  // Packed float32 values in any order are as random.
  DeviceBuffer RandomRouter() {
    DeviceBuffer buffer = *backend_->Allocate(
        *backend_->kernels().packed_weight_bytes({nullptr, DType::kFloat32, kExperts, kHidden, 0}));
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::generate_n(buffer.as<float>(), kExperts * kHidden, [&] { return normal(random); });
    return buffer;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  Machine machine_;
  Weights gate_, up_, down_;
  Weights shared_gate_, shared_up_, shared_down_;
  DeviceBuffer router_;
};

void Run() {
  for (const DType dtype : {DType::kBFloat16, DType::kQ8_0, DType::kQ4_K}) {
    ProductBench bench(dtype);
    bench.Decode(0.90);
    bench.Batch(6, 0.90);
    bench.Uneven(0);
  }
  BlockBench block;
  block.Bandwidth(0.80);
  block.Peak(64, 0.60);
}

}  // namespace
}  // namespace heddle

int main() { heddle::Run(); }
