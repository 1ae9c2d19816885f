#include "runtime/checkpoint/declared_weights.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/checkpoint/tensor_index.h"
#include "runtime/model/tensor_names.h"

namespace heddle {
namespace {

bool IsRouter(absl::string_view name) { return absl::EndsWith(name, ".gate.weight"); }

DType DeclaredDType(const ModelSpec& spec, const ExpectedTensor& tensor) {
  if (tensor.shape.size() == 1) return DType::kFloat32;
  // transformers quantises nn.Linear modules other than the head; a router is none.
  const bool quantised = spec.block_fp8.has_value() && tensor.name != kEmbeddingTensor &&
                         tensor.name != kHeadTensor && !IsRouter(tensor.name);
  return quantised ? DType::kFloat8E4M3 : spec.stored_dtype;
}

class DeclaredWeights : public WeightSource {
 public:
  explicit DeclaredWeights(std::vector<TensorInfo> tensors) : index_(std::move(tensors)) {}

  const std::vector<TensorInfo>& tensors() const override { return index_.tensors(); }
  const TensorInfo* Find(absl::string_view name) const override { return index_.Find(name); }
  absl::StatusOr<TensorSlice> Read(absl::string_view name, Range, Range) override {
    return Nothing(name);
  }
  absl::StatusOr<std::vector<float>> ReadVector(absl::string_view name, Range) override {
    return Nothing(name);
  }
  void Release(absl::string_view) override {}

 private:
  static absl::Status Nothing(absl::string_view name) {
    return absl::UnimplementedError(
        absl::StrCat(name, " cannot be read: only the config of this model is there"));
  }

  TensorIndex index_;
};

}  // namespace

std::unique_ptr<WeightSource> MakeDeclaredWeights(const ModelSpec& spec,
                                                  std::optional<DType> matrices) {
  std::vector<TensorInfo> tensors;
  for (ExpectedTensor& expected : ExpectedTensors(spec)) {
    const bool given = matrices.has_value() && expected.shape.size() == 2;
    const DType dtype = given ? *matrices : DeclaredDType(spec, expected);
    tensors.push_back({std::move(expected.name), dtype, std::move(expected.shape)});
  }
  return std::make_unique<DeclaredWeights>(std::move(tensors));
}

}  // namespace heddle
