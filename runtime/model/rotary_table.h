// The angles of RoPE on the device, and what turns heads by them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "runtime/model/rope_spec.h"

namespace heddle {

// Owned by an attention block; must not outlive the backend. Immutable.
class RotaryTable {
 public:
  // Of the positions [0, num_positions).
  static absl::StatusOr<RotaryTable> Create(const RopeSpec& spec, int64_t num_positions,
                                            Backend& backend);

  // Rotates the last rotary_dim elements of each head of x [tokens, heads * head_dim] in place.
  // `positions` [tokens] are in device memory.
  absl::Status Rotate(MatrixView x, int64_t num_heads, int64_t head_dim, const int32_t* positions,
                      Stream& stream) const;

 private:
  RotaryTable(const RopeSpec& spec, int64_t num_positions, Backend& backend);

  const KernelTable* kernels_;
  int64_t rotary_dim_;
  bool interleaved_;
  int64_t num_positions_;
  DeviceBuffer cos_sin_;  // [num_positions, rotary_dim]
};

}  // namespace heddle
