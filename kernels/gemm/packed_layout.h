// Where the elements of a packed weight are. Private to the CPU back end.
//
// W [n, k] is cut into panels of 16 rows of the checkpoint, that is, 16 columns of x W^T, which one
// task multiplies from first k to last. Within a panel all is read in the order of memory, and a
// vector of 4, 8 or 16 lanes holds as many columns, so that one layout serves every number of rows
// and every vector width, and each output element is a chain over ascending k in its own lane.
//
//   float32, float16  [k][16]
//   bfloat16          [k / 2][16][2]: widened by a shift (even k) and a mask (odd k)
//   block types       in groups of 32 elements of k, whatever the block of the file; 3 sections:
//     super   K-quants only: [blocks of 256][16] f16 scales (then [16] f16 minima)
//     scales  [groups] of: [16] f16 scale, then [16] f16 minimum if there is one; for K-quants
//             [16] u8 factors of the scale then of the minimum; for Q6_K [2][16] i8 factors
//     quants  [groups] of: [8][16][4] bytes; byte b of vector j is element 4 j + b.
//             Four bits: [4][16][4], vector j in the low nibbles and j + 4 in the high ones.
//             Five: then [16][4] bytes with the fifth bit of vector j at bit j.
//             Six: then [2][16][4] bytes with the upper two bits of vector j at 2 (j % 4) of j / 4.
//
//   float8        2 sections:
//     scales  [blocks of k][16] f32: of each column, that of its block of rows
//     quants  [k / 2][16][2] codes
//
// k is padded with zeros to whole steps of 8, or groups; columns past n are zeros.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/gemm/block_group.h"
#include "kernels/gemm/packed_weight.h"

namespace heddle {

inline constexpr int kPanelColumns = 16;
inline constexpr int kPlainStep = 8;    // k of a plain panel is a multiple of this
inline constexpr int kSuperGroups = 8;  // groups that share the f16 scale of a K-quant

constexpr int64_t GroupQuantBytes(DType dtype) {
  const BlockTraits traits = BlockTraitsOf(dtype);
  return kPanelColumns * kGroupElements * (traits.low_bits + traits.high_bits) / 8;
}

constexpr int64_t GroupScaleBytes(DType dtype) {
  const BlockTraits traits = BlockTraitsOf(dtype);
  return kPanelColumns * (traits.is_k_quant || !traits.has_minimum ? 2 : 4);
}

// Of an element of [k / 2][16][2].
constexpr int64_t PairIndex(int64_t k, int64_t column) {
  return (k / 2 * kPanelColumns + column) * 2 + k % 2;
}

struct PackedLayout {
  // InvalidArgument for types that are no weights, negative sizes and overflow.
  static absl::StatusOr<PackedLayout> Create(const PackedWeight& weight);
  // Of a weight that was packed, so that it must be valid.
  static PackedLayout Of(const PackedWeight& weight);

  const std::byte* Panel(const void* data, int64_t panel) const {
    return static_cast<const std::byte*>(data) + panel * panel_bytes;
  }
  std::byte* Panel(void* data, int64_t panel) const {
    return static_cast<std::byte*>(data) + panel * panel_bytes;
  }

  int64_t num_panels = 0;
  int64_t panel_bytes = 0;
  int64_t lead = 0;      // leading elements of k that are not ours: those of a cut group or step
  int64_t padded_k = 0;  // lead + k + padding
  // Block types:
  int64_t num_groups = 0;
  int64_t first_group = 0;  // of our first group within its block
  int64_t scales_offset = 0;
  // Float8:
  int64_t block_columns = 0;
  int64_t block_offset = 0;  // of the first k of the panel within its block
  // Both:
  int64_t quants_offset = 0;
};

}  // namespace heddle
