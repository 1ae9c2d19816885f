// Checks that the Validate functions of the ops share. Each message names the op and the argument.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/heads_view.h"
#include "kernels/base/tensor_view.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// A float32 matrix with sizes >= 0, rows that do not overlap, and memory unless it is empty.
absl::Status ValidateFloatMatrix(absl::string_view op, absl::string_view name,
                                 const ConstMatrixView& view);

// `view` is [rows, cols].
absl::Status ValidateShape(absl::string_view op, absl::string_view name,
                           const ConstMatrixView& view, int64_t rows, int64_t cols);

// Sizes >= 0, rows that do not overlap, and memory unless it is empty.
absl::Status ValidateHeads(absl::string_view op, absl::string_view name,
                           const ConstHeadsView& view);

// `view` is [tokens, heads, dim].
absl::Status ValidateHeadsShape(absl::string_view op, absl::string_view name,
                                const ConstHeadsView& view, int64_t tokens, int64_t heads,
                                int64_t dim);

// `pointer` is given unless `size` is 0.
absl::Status ValidateArray(absl::string_view op, absl::string_view name, const void* pointer,
                           int64_t size);

struct KvPlaneShape {
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t page_size = 0;
};
// A plane of a plain type whose heads and slots do not overlap; no memory is needed without heads.
absl::Status ValidateKvPlane(absl::string_view op, absl::string_view name, const KvPlane& plane,
                             const KvPlaneShape& shape);

}  // namespace heddle
