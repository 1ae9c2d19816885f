// Where a rank's weights come from, whatever the format of the checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"
#include "kernels/gemm/packed_weight.h"
#include "parallel/shard_spec.h"

namespace heddle {

struct TensorInfo {
  std::string name;  // "model.layers.0.self_attn.q_proj.weight"
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;  // [rows, cols] or [size]
};

// Rows in the file's mapping or in a buffer of their own; valid while `keep_alive` lives.
struct TensorSlice {
  WeightRows rows;
  std::shared_ptr<const void> keep_alive;
};

// Tensors under their Hugging Face names, exactly those that the model needs: names and shapes
// were checked against the ModelSpec when the checkpoint was opened. Owned and used by one rank's
// loading thread. Memory is touched only for what is read.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // In the order of the forward pass.
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  // Null if the checkpoint has no such tensor.
  virtual const TensorInfo* Find(absl::string_view name) const = 0;
  bool Has(absl::string_view name) const { return Find(name) != nullptr; }

  // Rows × columns of a matrix, those of a float8 one with their scales. An empty range gives no
  // rows or no columns. Columns of a quantised matrix may begin and end inside a block (see
  // WeightRows::k_offset), rows of a float8 one too (BlockScales::row_offset).
  virtual absl::StatusOr<TensorSlice> Read(absl::string_view name, Range rows, Range cols) = 0;

  // Elements of a vector (norms, biases), widened to float32.
  virtual absl::StatusOr<std::vector<float>> ReadVector(absl::string_view name, Range range) = 0;

  // Says that `name` has been read by this rank: the pages of its mapping leave the resident set.
  // Slices handed out stay valid, but touching them reads the file again.
  virtual void Release(absl::string_view name) = 0;
};

}  // namespace heddle
