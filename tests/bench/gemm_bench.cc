// The product of activations and packed weights, as shares of what the machine can do.
//
// Batch 1 is bound by reading the weights: bytes of the packed weight a second over the read
// bandwidth. Batches of 16 and more are bound by arithmetic: multiply-adds a second over the peak
// of float32 ones. Prefill is compared with OpenBLAS on float32 copies of the weights.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cblas.h"
#include "kernels/backend_registry.h"
#include "kernels/base/logging.h"
#include "kernels/kernel_table.h"
#include "tests/bench/machine.h"

namespace heddle {
namespace {

constexpr int kRepetitions = 9;
constexpr int64_t kN = 4096, kK = 4096;
constexpr int64_t kScaleBlock = 128;                // rows and columns of float8 that share a scale
constexpr int64_t kColdBytes = int64_t{192} << 20;  // more than the caches keep from round to round

// Copies of one packed weight, enough that each is read from memory.
class ColdWeights {
 public:
  ColdWeights(Backend& backend, Stream& stream, DType dtype, int64_t n, int64_t k) {
    const KernelTable& kernels = backend.kernels();
    const int64_t row_bytes = *RowBytes(dtype, k);
    std::vector<std::byte> rows(n * row_bytes);
    const int64_t blocks = (k + kScaleBlock - 1) / kScaleBlock;
    const std::vector<float> scales(blocks * ((n + kScaleBlock - 1) / kScaleBlock), 0.01f);
    // A quick generator. Any two bytes are the upper half of a moderate float, or a moderate half:
    // sums neither overflow nor become denormal, which some machines are slow with.
    uint32_t state = 1;
    for (std::byte& byte : rows) {
      state = state * 1664525 + 1013904223;
      byte = static_cast<std::byte>(0x38 + (state >> 24) % 7);
    }
    const WeightRows source = {
        rows.data(), dtype, row_bytes, n, k, 0, {scales.data(), blocks, kScaleBlock, kScaleBlock}};
    const PackedWeight shape = {nullptr, dtype, n, k, 0, kScaleBlock};
    const int64_t bytes = *kernels.packed_weight_bytes(shape);
    for (int64_t total = 0; total < kColdBytes; total += bytes) {
      buffers_.push_back(*backend.Allocate(bytes));
      weights_.push_back(shape);
      weights_.back().data = buffers_.back().data();
      if (weights_.size() == 1) {
        CHECK_OK(kernels.pack_weight(source, weights_[0], stream));
        CHECK_OK(stream.Synchronize());
      } else {
        std::memcpy(buffers_.back().data(), buffers_.front().data(), bytes);
      }
    }
    bytes_ = static_cast<double>(bytes) * static_cast<double>(weights_.size());
  }

  const std::vector<PackedWeight>& weights() const { return weights_; }
  double bytes() const { return bytes_; }  // of all

 private:
  std::vector<DeviceBuffer> buffers_;
  std::vector<PackedWeight> weights_;
  double bytes_ = 0;
};

class GemmBench {
 public:
  GemmBench()
      : backend_(*CreateBackend({.cpu = {.num_threads = BenchThreads()}})),
        stream_(*backend_->CreateStream()),
        machine_(*backend_, *stream_) {}

  // Share of the read bandwidth at one row.
  void Bandwidth(DType dtype, int64_t n, int64_t k, double asked) {
    const ColdWeights weights(*backend_, *stream_, dtype, n, k);
    machine_.Wake();
    const double ratio = Median(kRepetitions, [&] {
      const double bandwidth = machine_.ReadBytesPerSecond();
      return weights.bytes() / Multiply(weights, 1) / bandwidth;
    });
    PrintRatio(absl::StrCat("gemm_", DTypeName(dtype), "_", n, "x", k, "_batch_1_of_bandwidth"),
               ratio, asked);
  }

  // Share of the peak of multiply-adds.
  void Peak(DType dtype, int64_t rows, double asked) {
    const ColdWeights weights(*backend_, *stream_, dtype, kN, kK);
    machine_.Wake();
    const double operations =
        2.0 * static_cast<double>(rows * kN * kK) * static_cast<double>(weights.weights().size());
    const double ratio = Median(kRepetitions, [&] {
      const double peak = machine_.FlopsPerSecond();
      return operations / Multiply(weights, rows) / peak;
    });
    PrintRatio(absl::StrCat("gemm_", DTypeName(dtype), "_batch_", rows, "_of_peak"), ratio, asked);
  }

  void AgainstOpenBlas(DType dtype, int64_t rows, double asked) {
    const ColdWeights weights(*backend_, *stream_, dtype, kN, kK);
    const size_t count = std::max<size_t>(1, 1024 / rows / 4);  // products a measurement
    const std::vector<float> x(rows * kK, 0.5f), w(kN * kK, 0.25f);
    std::vector<float> out(rows * kN);
    openblas_set_num_threads(BenchThreads());
    machine_.Wake();
    const double ratio = Median(kRepetitions, [&] {
      const double theirs = Seconds([&] {
        for (size_t i = 0; i < count; ++i) {
          cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, kN, kK, 1.0f, x.data(), kK,
                      w.data(), kK, 0.0f, out.data(), kN);
        }
      });
      machine_.Wake();
      const double ours = Multiply(weights, rows, count);
      return theirs / ours;
    });
    PrintRatio(absl::StrCat("gemm_", DTypeName(dtype), "_prefill_", rows, "_against_openblas"),
               ratio, asked);
  }

 private:
  // Seconds for `count` products with the weights in turn; 0: one with each.
  double Multiply(const ColdWeights& weights, int64_t rows, size_t count = 0) {
    const std::vector<PackedWeight>& list = weights.weights();
    if (count == 0) count = list.size();
    const int64_t n = list[0].n, k = list[0].k;
    const std::vector<float> x(rows * k, 0.5f);
    std::vector<float> out(rows * n);
    const auto precision = IsBlockQuantised(list[0].dtype) ? ActivationPrecision::kInt8
                                                           : ActivationPrecision::kFloat32;
    return Seconds([&] {
      for (size_t i = 0; i < count; ++i) {
        CHECK_OK(backend_->kernels().linear({FloatMatrix(x.data(), rows, k), list[i % list.size()],
                                             nullptr, FloatMatrix(out.data(), rows, n), precision},
                                            *stream_));
      }
      CHECK_OK(stream_->Synchronize());
    });
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  Machine machine_;
};

void Run() {
  GemmBench bench;
  bench.Bandwidth(DType::kBFloat16, kN, kK, 0.85);
  bench.Bandwidth(DType::kQ8_0, kN, kK, 0.75);
  bench.Bandwidth(DType::kQ4_1, kN, kK, 0.75);
  bench.Bandwidth(DType::kFloat8E4M3, kN, kK, 0);
  bench.Bandwidth(DType::kQ4_K, kN, kK, 0);
  bench.Bandwidth(DType::kQ6_K, kN, kK, 0);
  bench.Bandwidth(DType::kFloat32, kN, kK, 0);
  bench.Bandwidth(DType::kBFloat16, 576, 1536, 0);  // a small model's
  bench.Bandwidth(DType::kQ4_1, 576, 1536, 0);
  for (int64_t rows : {16, 32, 64}) bench.Peak(DType::kBFloat16, rows, 0.70);
  for (int64_t rows : {2, 4, 8}) bench.Peak(DType::kBFloat16, rows, 0);
  for (DType dtype : {DType::kQ8_0, DType::kQ4_1, DType::kFloat8E4M3}) {
    for (int64_t rows : {8, 64}) bench.Peak(dtype, rows, 0);
  }
  bench.AgainstOpenBlas(DType::kBFloat16, 64, 1.20);
  bench.AgainstOpenBlas(DType::kBFloat16, 128, 1.05);
  bench.AgainstOpenBlas(DType::kBFloat16, 512, 0.95);
}

}  // namespace
}  // namespace heddle

int main() { heddle::Run(); }
