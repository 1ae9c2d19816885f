// A weight matrix W [n, k] in the layout that `linear` and `embedding` read.
//
// n are output features (rows of the checkpoint's tensor), k are input features. The stored type
// is kept: float32, bfloat16, float16, float8 with scales apart, or one of GGUF's block types,
// whose scales and quants are regrouped but never re-quantised. The layout itself is private to the
// backend.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"

namespace heddle {

// Scales of float8 weights, in host memory: element (row, column) of W is its code times
//   data[(row_offset + row) / block_rows * stride + (k_offset + column) / block_columns]
struct BlockScales {
  const float* data = nullptr;  // finite, and so small that no element overflows
  int64_t stride = 0;           // elements from a row of blocks to the next
  int64_t block_rows = 0;
  int64_t block_columns = 0;
  int64_t row_offset = 0;  // rows of the first block that belong to the neighbour; < block_rows

  // Those of W's row `row`, one for each block of columns.
  const float* Row(int64_t row) const { return data + (row_offset + row) / block_rows * stride; }
};

// Rows as a checkpoint stores them, row-major, in host memory.
//
// A shard of the columns may begin inside a quantisation block (heads win over blocks): `data`
// then points at that whole block and `k_offset` says how many of its leading elements belong to
// the neighbour. k_offset is 0 for plain types, whose `data` points at the first element.
struct WeightRows {
  const std::byte* data = nullptr;  // first (possibly cut) block of the first row
  DType dtype = DType::kFloat32;
  int64_t row_stride_bytes = 0;
  int64_t n = 0;
  int64_t k = 0;            // elements used, after k_offset
  int64_t k_offset = 0;     // < BlockElements(dtype), or < scales.block_columns
  BlockScales scales = {};  // float8 only
};

// Describes packed memory; owns nothing. Trivially copyable, so that ops can capture it.
struct PackedWeight {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t n = 0;
  int64_t k = 0;
  int64_t k_offset = 0;
  int64_t block_columns = 0;  // elements of k that share a scale; float8 only
};

// Weights of one shape and type, packed one behind the other: experts of a layer, heads.
struct PackedWeightStack {
  PackedWeight first;
  int64_t stride_bytes = 0;  // a multiple of 64, at least the bytes of one
  int64_t count = 0;

  PackedWeight at(int64_t i) const {
    PackedWeight weight = first;
    if (first.data == nullptr) return weight;  // of no elements
    weight.data = static_cast<const std::byte*>(first.data) + i * stride_bytes;
    return weight;
  }
};

// Bytes of device memory for a weight of the shape and type of `weight`, whose data is not looked
// at; InvalidArgument for a dtype that cannot be packed.
using PackedWeightBytesFn = absl::StatusOr<int64_t> (*)(const PackedWeight& weight);
// Packs `rows` into `target` (PackedWeightBytes of it). `target.dtype` may differ from rows.dtype
// only between the plain types (a value that becomes infinite is an OutOfRange error). A float8
// code that is NaN is an InvalidArgument error. `rows` must stay valid until the stream has passed.
using PackWeightFn = absl::Status (*)(const WeightRows& rows, const PackedWeight& target,
                                      Stream& stream);

}  // namespace heddle
