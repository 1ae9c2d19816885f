#include "runtime/checkpoint/dummy_weights.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/checkpoint/tensor_index.h"

namespace heddle {
namespace {

// The finaliser of SplitMix64: neighbouring inputs give unrelated outputs.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t TensorKey(uint64_t seed, absl::string_view name) {
  uint64_t key = Mix(seed + 1);
  for (const char c : name) key = Mix(key ^ static_cast<unsigned char>(c));
  return key;
}

// The elements of one tensor: uniform in [center - radius, center + radius).
struct Distribution {
  uint64_t key = 0;
  float center = 0.0f;
  float radius = 0.0f;

  float At(int64_t index) const {
    constexpr uint64_t kIncrement = 0x9e3779b97f4a7c15u;
    const uint64_t bits = Mix(key + static_cast<uint64_t>(index) * kIncrement);
    const float unit = static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f;  // [-1, 1)
    return center + radius * unit;
  }
};

Distribution DistributionOf(const TensorInfo& info, int64_t num_layers, uint64_t seed) {
  const uint64_t key = TensorKey(seed, info.name);
  if (info.shape.size() == 1) {
    const bool bias = absl::EndsWith(info.name, ".bias");
    return {key, bias ? 0.0f : 1.0f, 0.1f};
  }
  // Variance 1 / inputs keeps the size of a row; what is added to the residual stream shares it
  // out over the 2 additions of each layer. A uniform variable of radius r has variance r² / 3.
  double variance = 1.0 / static_cast<double>(info.shape[1]);
  if (absl::EndsWith(info.name, "o_proj.weight") || absl::EndsWith(info.name, "down_proj.weight") ||
      absl::EndsWith(info.name, ".w2.weight")) {  // Mixtral's down projection
    variance /= static_cast<double>(2 * num_layers);
  }
  return {key, 0.0f, static_cast<float>(std::sqrt(3.0 * variance))};
}

void StoreFloat(DType dtype, float value, std::byte* target) {
  if (dtype == DType::kFloat32) {
    std::memcpy(target, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? FloatToBFloat16(value) : FloatToFloat16(value);
  std::memcpy(target, &bits, sizeof(bits));
}

class DummyWeights : public WeightSource {
 public:
  DummyWeights(std::vector<TensorInfo> tensors, int64_t num_layers, uint64_t seed)
      : index_(std::move(tensors)), num_layers_(num_layers), seed_(seed) {}

  const std::vector<TensorInfo>& tensors() const override { return index_.tensors(); }
  const TensorInfo* Find(absl::string_view name) const override { return index_.Find(name); }

  absl::StatusOr<TensorSlice> Read(absl::string_view name, Range rows, Range cols) override {
    ASSIGN_OR_RETURN(const TensorInfo* info, index_.FindMatrix(name, rows, cols));
    const Distribution distribution = DistributionOf(*info, num_layers_, seed_);
    const int64_t element_bytes = BlockBytes(info->dtype);
    auto data = std::make_shared<std::vector<std::byte>>(rows.size() * cols.size() * element_bytes);
    std::byte* target = data->data();
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      for (int64_t col = cols.begin; col < cols.end; ++col) {
        StoreFloat(info->dtype, distribution.At(row * info->shape[1] + col), target);
        target += element_bytes;
      }
    }
    TensorSlice slice;
    slice.rows = {data->data(),  info->dtype, cols.size() * element_bytes, rows.size(), cols.size(),
                  /*k_offset=*/0};
    slice.keep_alive = std::move(data);
    return slice;
  }

  absl::StatusOr<std::vector<float>> ReadVector(absl::string_view name, Range range) override {
    ASSIGN_OR_RETURN(const TensorInfo* info, index_.FindVector(name, range));
    const Distribution distribution = DistributionOf(*info, num_layers_, seed_);
    std::vector<float> values;
    for (int64_t i = range.begin; i < range.end; ++i) values.push_back(distribution.At(i));
    return values;
  }

  void Release(absl::string_view) override {}  // slices own their memory

 private:
  TensorIndex index_;
  int64_t num_layers_;
  uint64_t seed_;
};

}  // namespace

std::unique_ptr<WeightSource> MakeDummyWeights(const ModelSpec& spec, uint64_t seed) {
  CHECK(IsFloatingPoint(spec.stored_dtype));
  std::vector<TensorInfo> tensors;
  for (ExpectedTensor& expected : ExpectedTensors(spec)) {
    tensors.push_back({std::move(expected.name), spec.stored_dtype, std::move(expected.shape)});
  }
  return std::make_unique<DummyWeights>(std::move(tensors), spec.num_layers, seed);
}

}  // namespace heddle
