#include "runtime/checkpoint/stored_tensor.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace heddle {

std::optional<int64_t> CountElements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  bool overflow = false;
  bool empty = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    empty = empty || dimension == 0;
    overflow = overflow || __builtin_mul_overflow(elements, dimension, &elements);
  }
  if (empty) return 0;
  if (overflow) return std::nullopt;
  return elements;
}

std::string ShapeName(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::Status CheckSpans(const std::vector<StoredTensor>& tensors, int64_t data_begin,
                        int64_t file_size, int64_t alignment) {
  std::vector<const StoredTensor*> in_order;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.bytes > 0) in_order.push_back(&tensor);
  }
  std::sort(in_order.begin(), in_order.end(),
            [](const StoredTensor* a, const StoredTensor* b) { return a->offset < b->offset; });

  int64_t data_end = data_begin;
  std::vector<std::string> cut_off;
  for (const StoredTensor* tensor : in_order) {
    if (tensor->offset < data_end) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor->name, " at byte ",
                                                     tensor->offset, " overlaps what ends at byte ",
                                                     data_end));
    }
    if (__builtin_add_overflow(tensor->offset, tensor->bytes, &data_end)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the end of tensor ", tensor->name, " overflows"));
    }
    if (data_end > file_size) cut_off.push_back(tensor->name);
  }
  if (!cut_off.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cut off: expected ", data_end, " bytes, found ", file_size,
                     "; was its download interrupted? Incomplete: ", absl::StrJoin(cut_off, ", ")));
  }
  if (file_size - data_end >= alignment) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_size - data_end, " trailing bytes: expected ", data_end, " bytes, found ",
                     file_size, "; was something appended, or two downloads joined?"));
  }
  return absl::OkStatus();
}

}  // namespace heddle
