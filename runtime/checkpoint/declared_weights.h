// A checkpoint that is not there: what its config says it would hold.
#pragma once

#include <memory>
#include <optional>

#include "kernels/base/dtype.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"

namespace heddle {

// Names, shapes and types alone, for layouts and costs; reading is Unimplemented. Matrices are of
// the type that the config declares, those of the layers but the router in float8 where it has
// block_fp8, or all in `matrices` if that is set; vectors are float32.
std::unique_ptr<WeightSource> MakeDeclaredWeights(const ModelSpec& spec,
                                                  std::optional<DType> matrices = std::nullopt);

}  // namespace heddle
