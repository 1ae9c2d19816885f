#include "kernels/base/dtype.h"

#include <array>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

struct Traits {
  DType dtype;
  const char* name;
  int64_t block_elements;
  int64_t block_bytes;
};

// In the order of the enum.
constexpr std::array<Traits, 17> kTraits = {{
    {DType::kFloat32, "float32", 1, 4},
    {DType::kBFloat16, "bfloat16", 1, 2},
    {DType::kFloat16, "float16", 1, 2},
    {DType::kInt32, "int32", 1, 4},
    {DType::kInt64, "int64", 1, 8},
    {DType::kInt8, "int8", 1, 1},
    {DType::kUint8, "uint8", 1, 1},
    {DType::kBool, "bool", 1, 1},
    {DType::kFloat8E4M3, "float8_e4m3", 1, 1},
    {DType::kQ8_0, "Q8_0", 32, 34},
    {DType::kQ4_0, "Q4_0", 32, 18},
    {DType::kQ4_1, "Q4_1", 32, 20},
    {DType::kQ5_0, "Q5_0", 32, 22},
    {DType::kQ5_1, "Q5_1", 32, 24},
    {DType::kQ4_K, "Q4_K", 256, 144},
    {DType::kQ5_K, "Q5_K", 256, 176},
    {DType::kQ6_K, "Q6_K", 256, 210},
}};

const Traits& TraitsOf(DType dtype) { return kTraits[static_cast<size_t>(dtype)]; }

float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace

absl::string_view DTypeName(DType dtype) { return TraitsOf(dtype).name; }

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (const Traits& traits : kTraits) {
    if (name == traits.name) return traits.dtype;
  }
  if (name == "f32" || name == "float") return DType::kFloat32;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "f16" || name == "half") return DType::kFloat16;
  return absl::InvalidArgumentError(
      absl::StrCat("unknown dtype \"", name, "\"; known are float32, bfloat16 and float16"));
}

int64_t BlockElements(DType dtype) { return TraitsOf(dtype).block_elements; }
int64_t BlockBytes(DType dtype) { return TraitsOf(dtype).block_bytes; }

bool IsFloatingPoint(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

absl::StatusOr<int64_t> RowBytes(DType dtype, int64_t elements) {
  const Traits& traits = TraitsOf(dtype);
  if (elements < 0 || elements % traits.block_elements != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a row of ", elements, " elements is not a ",
                                                   "whole number of ", traits.name, " blocks of ",
                                                   traits.block_elements));
  }
  const int64_t num_blocks = elements / traits.block_elements;
  if (num_blocks > std::numeric_limits<int64_t>::max() / traits.block_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a row of ", elements, " elements overflows"));
  }
  return num_blocks * traits.block_bytes;
}

float BFloat16ToFloat(uint16_t bits) { return BitsToFloat(static_cast<uint32_t>(bits) << 16); }

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  const uint32_t rounding = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((bits + rounding) >> 16);
}

float Float16ToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return BitsToFloat(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return BitsToFloat(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24, exact in float.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

uint16_t FloatToFloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude < 0x38800000u) {                        // subnormal or zero
    // Adding 0.5 leaves the value in units of 2^-24 in the low mantissa bits, rounded to even.
    const float shifted = BitsToFloat(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (FloatToBits(shifted) - FloatToBits(0.5f)));
  }
  const uint32_t rounding = 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude + rounding - 0x38000000u) >> 13));
}

float Float8E4M3ToFloat(uint8_t bits) {
  if (IsFloat8E4M3Nan(bits)) return std::numeric_limits<float>::quiet_NaN();
  // The fields of a float16, whose exponent has one bit more and a bias that is larger by 8.
  const auto half = static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7);
  return Float16ToFloat(half) * 0x1p8f;
}

}  // namespace heddle
