// How the elements of a tensor are stored.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// The block types are those of GGUF (ggml): `BlockElements` consecutive elements
// of a row share scales and take `BlockBytes` bytes in a file.
enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt32,
  kInt64,
  kInt8,
  kUint8,
  kBool,
  kFloat8E4M3,  // 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f and 0xff are NaN
  kQ8_0,        // 32 elements: f16 scale, 32 x int8
  kQ4_0,        // 32: f16 scale, 32 x 4 bits (minus 8)
  kQ4_1,        // 32: f16 scale, f16 minimum, 32 x 4 bits
  kQ5_0,        // 32: f16 scale, 32 high bits, 32 x 4 bits (minus 16)
  kQ5_1,        // 32: f16 scale, f16 minimum, 32 high bits, 32 x 4 bits
  kQ4_K,        // 256: f16 scale and minimum, 8 x (6-bit scale, 6-bit minimum), 256 x 4 bits
  kQ5_K,        // 256: as Q4_K with 256 high bits
  kQ6_K,        // 256: 256 x 4 low bits, 256 x 2 high bits, 16 x int8 scale, f16 scale
};

// "float32", "bfloat16", "Q4_K", ...
absl::string_view DTypeName(DType dtype);
// The inverse of DTypeName, and the short spellings f32, bf16, f16. InvalidArgument else.
absl::StatusOr<DType> ParseDType(absl::string_view name);

// Elements that share one block; 1 for the plain types.
int64_t BlockElements(DType dtype);
// Bytes of one block as stored in a file; the element size for the plain types.
int64_t BlockBytes(DType dtype);
inline bool IsBlockQuantised(DType dtype) { return BlockElements(dtype) > 1; }
// float32, bfloat16 or float16.
bool IsFloatingPoint(DType dtype);
// Weights that are nothing without scales: the block types hold them, those of float8 are apart.
inline bool IsQuantised(DType dtype) {
  return IsBlockQuantised(dtype) || dtype == DType::kFloat8E4M3;
}

// Bytes of a row of `elements` as stored in a file. InvalidArgument if it is not
// a whole number of blocks or overflows.
absl::StatusOr<int64_t> RowBytes(DType dtype, int64_t elements);

// Conversions of one element, exact where the target can hold it, else to nearest even.
float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);
float Float16ToFloat(uint16_t bits);
uint16_t FloatToFloat16(float value);
// OCP's 8-bit floating point specification, revision 1.0, table 1.
float Float8E4M3ToFloat(uint8_t bits);
inline bool IsFloat8E4M3Nan(uint8_t bits) { return (bits & 0x7f) == 0x7f; }

}  // namespace heddle
