// The scales of block-fp8 matrices: checked when a checkpoint is opened, read beside their codes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/mapped_weights.h"
#include "runtime/checkpoint/stored_tensor.h"
#include "runtime/model/model_spec.h"

namespace heddle {

// "NAME_scale_inv": DeepSeek-V3's name of the scales of tensor NAME.
std::string ScaleTensorName(absl::string_view matrix);

// Appends what is wrong with `scales`, which belong to `matrix`: a float for each block is asked
// for, the last ones short.
void CheckScaleTensor(const StoredTensor& matrix, const StoredTensor& scales,
                      const BlockFp8Spec& blocks, std::vector<std::string>& problems);

// The scales of the blocks that rows × columns touch, widened: the result's data is `values`.
// `row_offset` and the blocks' sizes are set. InvalidArgument names a scale that is negative, not
// finite, or so large that the largest code would overflow. Zero is legal: blocks of zeros have it.
absl::StatusOr<BlockScales> ReadScales(const MappedTensor& scales, const BlockFp8Spec& blocks,
                                       Range rows, Range cols, std::vector<float>& values);

// InvalidArgument names the first code of `rows` that is NaN; their first element is `name`'s
// [first_row, first_column].
absl::Status CheckCodes(absl::string_view name, const WeightRows& rows, int64_t first_row,
                        int64_t first_column);

}  // namespace heddle
