// Random weights without a file.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/checkpoint/weight_source.h"
#include "runtime/model/model_spec.h"

namespace heddle {

// Every element is a function of (seed, tensor name, global element index), so that slices agree
// at every number of ranks. Stored as `spec.stored_dtype`; norm weights lie near 1, and matrices
// are scaled so that activations keep their size through the layers.
std::unique_ptr<WeightSource> MakeDummyWeights(const ModelSpec& spec, uint64_t seed);

}  // namespace heddle
