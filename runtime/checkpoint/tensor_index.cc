#include "runtime/checkpoint/tensor_index.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace heddle {

TensorIndex::TensorIndex(std::vector<TensorInfo> tensors) : tensors_(std::move(tensors)) {
  for (size_t i = 0; i < tensors_.size(); ++i) positions_.emplace(tensors_[i].name, i);
}

const TensorInfo* TensorIndex::Find(absl::string_view name) const {
  const auto it = positions_.find(name);
  return it == positions_.end() ? nullptr : &tensors_[it->second];
}

absl::StatusOr<const TensorInfo*> TensorIndex::FindMatrix(absl::string_view name, Range rows,
                                                          Range cols) const {
  return FindChecked(name, {rows, cols});
}

absl::StatusOr<const TensorInfo*> TensorIndex::FindVector(absl::string_view name,
                                                          Range range) const {
  return FindChecked(name, {range});
}

absl::StatusOr<const TensorInfo*> TensorIndex::FindChecked(absl::string_view name,
                                                           const std::vector<Range>& ranges) const {
  const TensorInfo* info = Find(name);
  if (info == nullptr) {
    return absl::NotFoundError(absl::StrCat("the checkpoint has no tensor ", name));
  }
  if (info->shape.size() != ranges.size()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " has ", info->shape.size(),
                                                   " dimensions, not ", ranges.size()));
  }
  for (size_t axis = 0; axis < ranges.size(); ++axis) {
    const Range range = ranges[axis];
    if (range.begin < 0 || range.begin > range.end || range.end > info->shape[axis]) {
      return absl::InvalidArgumentError(absl::StrCat("[", range.begin, ", ", range.end,
                                                     ") is outside axis ", axis, " of tensor ",
                                                     name, ", which has ", info->shape[axis]));
    }
  }
  return info;
}

}  // namespace heddle
