// Finds tensors by name and checks what is asked of them; shared by the kinds of WeightSource.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/weight_source.h"

namespace heddle {

// Immutable.
class TensorIndex {
 public:
  explicit TensorIndex(std::vector<TensorInfo> tensors);
  TensorIndex(const TensorIndex&) = delete;  // the names it looks up are its own
  TensorIndex& operator=(const TensorIndex&) = delete;

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* Find(absl::string_view name) const;
  // Of an entry of tensors().
  size_t PositionOf(const TensorInfo& info) const { return &info - tensors_.data(); }

  // NotFound, or InvalidArgument if it is no matrix or a range lies outside of it.
  absl::StatusOr<const TensorInfo*> FindMatrix(absl::string_view name, Range rows,
                                               Range cols) const;
  absl::StatusOr<const TensorInfo*> FindVector(absl::string_view name, Range range) const;

 private:
  absl::StatusOr<const TensorInfo*> FindChecked(absl::string_view name,
                                                const std::vector<Range>& ranges) const;

  std::vector<TensorInfo> tensors_;
  absl::flat_hash_map<absl::string_view, size_t> positions_;
};

}  // namespace heddle
