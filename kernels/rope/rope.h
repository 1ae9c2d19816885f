// Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in place.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

// Rotates the last `rotary_dim` elements of each head by the angles of its token's position. (So
// MLA's queries are heads of nope + rope elements, and a row of its kv_a is one head that ends in
// the rotated key.)
// Pairs are (i, i + rotary_dim/2) (Hugging Face), or (2i, 2i + 1) when interleaved (GGUF llama,
// DeepSeek). cos_sin is built from float64 angles, scaled by YaRN's attention factor if any.
struct RopeArgs {
  MatrixView x;  // [tokens, heads * head_dim]
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // even, <= head_dim
  bool interleaved = false;
  const float* cos_sin = nullptr;  // [num_positions, rotary_dim]: rotary_dim/2 cosines, then sines
  int64_t num_positions = 0;
  const int32_t* positions = nullptr;  // [tokens], device, each < num_positions
};

absl::Status ValidateRope(const RopeArgs& args);
using RopeFn = absl::Status (*)(const RopeArgs& args, Stream& stream);

}  // namespace heddle
