// The GGUF format, versions 2 and 3: typed metadata, tensor descriptions, aligned tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/stored_tensor.h"

namespace heddle {

enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// A metadata value, decoded when asked. Its bytes were checked to lie inside the file and to hold
// `count` elements; they borrow from it. Every accessor gives nullopt for a value of another type.
class GgufValue {
 public:
  GgufValue(GgufType element_type, bool is_array, uint64_t count, absl::string_view bytes)
      : element_type_(element_type), is_array_(is_array), count_(count), bytes_(bytes) {}

  std::string TypeName() const;  // "uint32", "array of string"

  std::optional<int64_t> Integer() const;  // of any width; nullopt above 2^63 - 1
  std::optional<double> Number() const;    // floating point or integer
  std::optional<bool> Bool() const;
  std::optional<absl::string_view> String() const;
  std::optional<std::vector<int64_t>> Integers() const;
  std::optional<std::vector<float>> Floats() const;  // float32 or float64
  std::optional<std::vector<absl::string_view>> Strings() const;

 private:
  GgufType element_type_;
  bool is_array_;
  uint64_t count_;
  absl::string_view bytes_;
};

struct GgufFile {
  uint32_t version = 0;
  absl::flat_hash_map<std::string, GgufValue> metadata;
  std::vector<StoredTensor> tensors;  // shapes as [rows, cols], the file's order reversed
};

// Parses and checks everything before the tensor data of a whole file, which must outlive the
// result. Every span lies inside `contents`, has the size its type and shape ask for, and overlaps
// no other.
absl::StatusOr<GgufFile> ParseGguf(absl::string_view contents, absl::string_view file_name);

}  // namespace heddle
