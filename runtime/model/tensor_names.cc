#include "runtime/model/tensor_names.h"

namespace heddle {
namespace {

bool IsMixtral(const ModelSpec& spec) { return spec.model_type == "mixtral"; }

absl::string_view MoeBlock(const ModelSpec& spec) {
  return IsMixtral(spec) ? "block_sparse_moe" : "mlp";
}

absl::string_view MatrixName(FfnMatrix matrix) {
  switch (matrix) {
    case FfnMatrix::kGate:
      return "gate_proj";
    case FfnMatrix::kUp:
      return "up_proj";
    case FfnMatrix::kDown:
      return "down_proj";
  }
  return "";
}

absl::string_view MixtralMatrixName(FfnMatrix matrix) {
  switch (matrix) {
    case FfnMatrix::kGate:
      return "w1";
    case FfnMatrix::kUp:
      return "w3";
    case FfnMatrix::kDown:
      return "w2";
  }
  return "";
}

}  // namespace

std::string RouterTensor(const ModelSpec& spec, int64_t layer) {
  return LayerTensor(layer, absl::StrCat(MoeBlock(spec), ".gate.weight"));
}

std::string CorrectionBiasTensor(const ModelSpec& spec, int64_t layer) {
  return LayerTensor(layer, absl::StrCat(MoeBlock(spec), ".gate.e_score_correction_bias"));
}

std::string ExpertTensor(const ModelSpec& spec, int64_t layer, int64_t expert, FfnMatrix matrix) {
  const absl::string_view name = IsMixtral(spec) ? MixtralMatrixName(matrix) : MatrixName(matrix);
  return LayerTensor(layer,
                     absl::StrCat(MoeBlock(spec), ".experts.", expert, ".", name, ".weight"));
}

std::string SharedExpertsTensor(int64_t layer, FfnMatrix matrix) {
  return LayerTensor(layer, absl::StrCat("mlp.shared_experts.", MatrixName(matrix), ".weight"));
}

}  // namespace heddle
