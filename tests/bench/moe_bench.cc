// The products of a mixture of experts of DeepSeek-V2-Lite's size, compared with `linear` on the
// same weights: experts one behind the other are, packed, one weight of all their rows.
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
#include "tests/bench/machine.h"

namespace heddle {
namespace {

constexpr int kRepetitions = 9;
constexpr int64_t kExperts = 64, kTopK = 6;
constexpr int64_t kHidden = 2048, kColumns = 1408;

class MoeBench {
 public:
  explicit MoeBench(DType dtype)
      : dtype_(dtype),
        precision_(IsBlockQuantised(dtype) ? ActivationPrecision::kInt8
                                           : ActivationPrecision::kFloat32),
        backend_(*CreateBackend({.cpu = {.num_threads = BenchThreads()}})),
        stream_(*backend_->CreateStream()),
        machine_(*backend_, *stream_) {
    const KernelTable& kernels = backend_->kernels();
    const int64_t row_bytes = *RowBytes(dtype, kHidden);
    std::vector<std::byte> rows(kColumns * row_bytes);
    std::mt19937 random(1);
    // Every byte of a float stays far from NaN and from denormals.
    for (std::byte& byte : rows) byte = static_cast<std::byte>(random() % 0x3f);
    const int64_t bytes = *kernels.packed_weight_bytes(dtype, kColumns, kHidden, 0);
    weights_ = *backend_->Allocate(kExperts * bytes);
    stack_ = {{weights_.data(), dtype, kColumns, kHidden, 0}, bytes, kExperts};
    CHECK_OK(kernels.pack_weight({rows.data(), dtype, row_bytes, kColumns, kHidden, 0},
                                 stack_.first, *stream_));
    CHECK_OK(stream_->Synchronize());
    for (int64_t e = 1; e < kExperts; ++e) {
      std::memcpy(weights_.as<std::byte>() + e * bytes, weights_.data(), bytes);
    }
  }

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
    machine_.Wake();
    const double ratio = Median(kRepetitions, [&] {
      double linear = 0, grouped = 0;
      for (int64_t first = 0; first + experts <= kExperts; first += experts) {
        PackedWeight whole = stack_.at(first);
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
                                      .weights = {stack_.at(first), stack_.stride_bytes, experts},
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
  DeviceBuffer weights_;
  PackedWeightStack stack_;
};

void Run() {
  for (const DType dtype : {DType::kBFloat16, DType::kQ8_0, DType::kQ4_K}) {
    MoeBench bench(dtype);
    bench.Decode(dtype == DType::kBFloat16 ? 0.80 : 0);
    bench.Batch(6, dtype == DType::kBFloat16 ? 0.90 : 0);
    bench.Uneven(0);
  }
}

}  // namespace
}  // namespace heddle

int main() { heddle::Run(); }
