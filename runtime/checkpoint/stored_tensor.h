// A tensor as the header of a file describes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"

namespace heddle {

struct StoredTensor {
  std::string name;
  std::string type_name;       // as the format spells it: "BF16", "Q4_K"
  std::optional<DType> dtype;  // unset: a type that Heddle knows no arithmetic for
  std::vector<int64_t> shape;  // [rows, cols] or [size]; a zero makes it empty
  int64_t offset = 0;          // of its bytes, from the start of the file
  int64_t bytes = 0;
};

// Elements of a shape; nullopt if a dimension is negative or the product overflows.
std::optional<int64_t> CountElements(const std::vector<int64_t>& shape);

std::string ShapeName(const std::vector<int64_t>& shape);  // "[576, 64]"

// Checks that all tensors lie in [data_begin, file_size) without overlap, and that nothing but
// less than `alignment` bytes of padding follows the last one. Names what is cut off, with the
// expected size of the file.
absl::Status CheckSpans(const std::vector<StoredTensor>& tensors, int64_t data_begin,
                        int64_t file_size, int64_t alignment);

}  // namespace heddle
