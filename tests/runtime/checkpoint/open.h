// Checkpoints that tests open and read.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "runtime/checkpoint/checkpoint.h"

namespace heddle {

// Of a directory of tests/golden/models.
std::string GoldenPath(absl::string_view name);

// Fails the test, and gives an empty checkpoint, if it does not open.
Checkpoint MustOpen(const std::string& path, LoadFormat format = LoadFormat::kAuto,
                    uint64_t seed = 0);
TensorSlice MustRead(WeightSource& weights, absl::string_view name, Range rows, Range cols);
std::vector<float> MustReadVector(WeightSource& weights, absl::string_view name, Range range);

// The bytes that a slice points at, row after row, whole blocks.
std::string SliceBytes(const TensorSlice& slice);

}  // namespace heddle
