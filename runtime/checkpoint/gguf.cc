#include "runtime/checkpoint/gguf.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <type_traits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "runtime/checkpoint/mapped_file.h"

namespace heddle {
namespace {

constexpr uint64_t kMaxDimensions = 4;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMaxAlignment = int64_t{1} << 20;

struct TensorType {
  uint32_t id;
  absl::string_view name;
  std::optional<DType> dtype;
};

constexpr TensorType kTensorTypes[] = {
    {0, "F32", DType::kFloat32},   {1, "F16", DType::kFloat16},    {2, "Q4_0", DType::kQ4_0},
    {3, "Q4_1", DType::kQ4_1},     {6, "Q5_0", DType::kQ5_0},      {7, "Q5_1", DType::kQ5_1},
    {8, "Q8_0", DType::kQ8_0},     {12, "Q4_K", DType::kQ4_K},     {13, "Q5_K", DType::kQ5_K},
    {14, "Q6_K", DType::kQ6_K},    {24, "I8", DType::kInt8},       {26, "I32", DType::kInt32},
    {27, "I64", DType::kInt64},    {30, "BF16", DType::kBFloat16}, {9, "Q8_1", std::nullopt},
    {10, "Q2_K", std::nullopt},    {11, "Q3_K", std::nullopt},     {15, "Q8_K", std::nullopt},
    {16, "IQ2_XXS", std::nullopt}, {17, "IQ2_XS", std::nullopt},   {18, "IQ3_XXS", std::nullopt},
    {19, "IQ1_S", std::nullopt},   {20, "IQ4_NL", std::nullopt},   {21, "IQ3_S", std::nullopt},
    {22, "IQ2_S", std::nullopt},   {23, "IQ4_XS", std::nullopt},   {25, "I16", std::nullopt},
    {28, "F64", std::nullopt},     {29, "IQ1_M", std::nullopt},    {34, "TQ1_0", std::nullopt},
    {35, "TQ2_0", std::nullopt},   {39, "MXFP4", std::nullopt},
};

// Bytes of a scalar; 0 for strings, arrays and numbers that are no type.
int64_t ScalarBytes(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      return 0;
  }
  return 0;
}

bool IsFloat(GgufType type) { return type == GgufType::kFloat32 || type == GgufType::kFloat64; }

bool IsInteger(GgufType type) {
  return ScalarBytes(type) > 0 && !IsFloat(type) && type != GgufType::kBool;
}

absl::string_view ScalarName(GgufType type) {
  constexpr absl::string_view kNames[] = {"uint8",  "int8",    "uint16", "int16",  "uint32",
                                          "int32",  "float32", "bool",   "string", "array",
                                          "uint64", "int64",   "float64"};
  return kNames[static_cast<uint32_t>(type)];
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <typename T>
T Load(const char* bytes) {
  T value;  // little-endian, as are the machines Heddle runs on
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// Calls `visit` with the number at `bytes` in its own C++ type; not at all if `type` is not
// numeric.
template <typename Visitor>
void VisitNumber(GgufType type, const char* bytes, Visitor visit) {
  switch (type) {
    case GgufType::kUint8:
      return visit(Load<uint8_t>(bytes));
    case GgufType::kInt8:
      return visit(Load<int8_t>(bytes));
    case GgufType::kUint16:
      return visit(Load<uint16_t>(bytes));
    case GgufType::kInt16:
      return visit(Load<int16_t>(bytes));
    case GgufType::kUint32:
      return visit(Load<uint32_t>(bytes));
    case GgufType::kInt32:
      return visit(Load<int32_t>(bytes));
    case GgufType::kUint64:
      return visit(Load<uint64_t>(bytes));
    case GgufType::kInt64:
      return visit(Load<int64_t>(bytes));
    case GgufType::kFloat32:
      return visit(Load<float>(bytes));
    case GgufType::kFloat64:
      return visit(Load<double>(bytes));
    case GgufType::kBool:
    case GgufType::kString:
    case GgufType::kArray:
      return;
  }
}

std::optional<int64_t> LoadInteger(GgufType type, const char* bytes) {
  std::optional<int64_t> integer;
  VisitNumber(type, bytes, [&](auto value) {
    if constexpr (std::is_integral_v<decltype(value)>) {
      if (std::in_range<int64_t>(value)) integer = static_cast<int64_t>(value);
    }
  });
  return integer;
}

std::optional<double> LoadNumber(GgufType type, const char* bytes) {
  std::optional<double> number;
  VisitNumber(type, bytes, [&](auto value) { number = static_cast<double>(value); });
  return number;
}

// Takes values off the front of a file; every failure names the place.
class Cursor {
 public:
  explicit Cursor(absl::string_view contents) : contents_(contents) {}

  int64_t offset() const { return static_cast<int64_t>(offset_); }
  uint64_t remaining() const { return contents_.size() - offset_; }

  absl::Status Error(absl::string_view text) const {
    return absl::InvalidArgumentError(absl::StrCat(text, " (near byte ", offset_, ")"));
  }

  template <typename T>
  absl::StatusOr<T> Take() {
    ASSIGN_OR_RETURN(const absl::string_view bytes, TakeBytes(sizeof(T)));
    return Load<T>(bytes.data());
  }

  absl::StatusOr<absl::string_view> TakeBytes(uint64_t count) {
    if (count > remaining()) {
      return Error(absl::StrCat("expected ", count, " more bytes, found ", remaining(),
                                "; was the download interrupted?"));
    }
    const absl::string_view bytes = contents_.substr(offset_, count);
    offset_ += count;
    return bytes;
  }

  absl::StatusOr<absl::string_view> TakeString() {
    ASSIGN_OR_RETURN(const uint64_t length, Take<uint64_t>());
    return TakeBytes(length);
  }

  // A count of things that take at least `min_bytes` each, which the rest of the file can hold.
  absl::StatusOr<uint64_t> TakeCount(absl::string_view what, uint64_t min_bytes) {
    ASSIGN_OR_RETURN(const uint64_t count, Take<uint64_t>());
    if (count > remaining() / min_bytes) {
      return Error(
          absl::StrCat(count, " ", what, " do not fit in the ", remaining(), " bytes that follow"));
    }
    return count;
  }

 private:
  absl::string_view contents_;
  size_t offset_ = 0;
};

absl::StatusOr<GgufType> TakeType(Cursor& cursor) {
  ASSIGN_OR_RETURN(const uint32_t id, cursor.Take<uint32_t>());
  if (id > static_cast<uint32_t>(GgufType::kFloat64)) {
    return cursor.Error(absl::StrCat("unknown metadata type ", id));
  }
  return static_cast<GgufType>(id);
}

absl::StatusOr<GgufValue> TakeValue(Cursor& cursor) {
  ASSIGN_OR_RETURN(GgufType type, TakeType(cursor));
  const bool is_array = type == GgufType::kArray;
  uint64_t count = 1;
  if (is_array) {
    ASSIGN_OR_RETURN(type, TakeType(cursor));
    if (type == GgufType::kArray) return cursor.Error("an array of arrays");
    const uint64_t min_bytes = type == GgufType::kString ? sizeof(uint64_t) : ScalarBytes(type);
    ASSIGN_OR_RETURN(count, cursor.TakeCount("array elements", min_bytes));
  }
  if (type != GgufType::kString) {
    ASSIGN_OR_RETURN(const absl::string_view bytes, cursor.TakeBytes(count * ScalarBytes(type)));
    return GgufValue(type, is_array, count, bytes);
  }
  Cursor start = cursor;
  const int64_t begin = cursor.offset();
  for (uint64_t i = 0; i < count; ++i) RETURN_IF_ERROR(cursor.TakeString().status());
  ASSIGN_OR_RETURN(const absl::string_view bytes, start.TakeBytes(cursor.offset() - begin));
  return GgufValue(type, is_array, count, bytes);
}

absl::Status ParseMetadata(Cursor& cursor, uint64_t count, GgufFile& file) {
  for (uint64_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(const absl::string_view key, cursor.TakeString());
    absl::StatusOr<GgufValue> value = TakeValue(cursor);
    if (!value.ok()) return Annotate(value.status(), absl::StrCat("metadata key ", key));
    if (!file.metadata.emplace(std::string(key), *value).second) {
      return cursor.Error(absl::StrCat("metadata key ", key, " is given twice"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Alignment(const GgufFile& file, const Cursor& cursor) {
  const auto it = file.metadata.find("general.alignment");
  if (it == file.metadata.end()) return kDefaultAlignment;
  const std::optional<int64_t> alignment = it->second.Integer();
  if (!alignment || *alignment < 1 || *alignment > kMaxAlignment ||
      (*alignment & (*alignment - 1)) != 0) {
    return cursor.Error(
        absl::StrCat("general.alignment must be a power of two up to ", kMaxAlignment));
  }
  return *alignment;
}

// Sets dtype and bytes; what has no dtype here keeps 0 bytes and cannot be read.
absl::Status SizeTensor(const Cursor& cursor, uint32_t type_id, StoredTensor& tensor) {
  tensor.type_name = absl::StrCat("type ", type_id);
  for (const TensorType& type : kTensorTypes) {
    if (type.id != type_id) continue;
    tensor.type_name = std::string(type.name);
    tensor.dtype = type.dtype;
  }
  const std::optional<int64_t> elements = CountElements(tensor.shape);
  if (!elements) {
    return cursor.Error(absl::StrCat("the size of shape ", ShapeName(tensor.shape), " overflows"));
  }
  if (!tensor.dtype || *elements == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const int64_t row_bytes, RowBytes(*tensor.dtype, tensor.shape.back()));
  if (__builtin_mul_overflow(row_bytes, *elements / tensor.shape.back(), &tensor.bytes)) {
    return cursor.Error(absl::StrCat("the size of shape ", ShapeName(tensor.shape), " overflows"));
  }
  return absl::OkStatus();
}

// The offset is still relative to the start of the tensor data.
absl::Status TakeTensor(Cursor& cursor, int64_t alignment, StoredTensor& tensor) {
  ASSIGN_OR_RETURN(const uint32_t num_dimensions, cursor.Take<uint32_t>());
  if (num_dimensions < 1 || num_dimensions > kMaxDimensions) {
    return cursor.Error(
        absl::StrCat(num_dimensions, " dimensions; supported are 1 to ", kMaxDimensions));
  }
  tensor.shape.resize(num_dimensions);
  for (uint32_t i = 0; i < num_dimensions; ++i) {
    ASSIGN_OR_RETURN(const uint64_t dimension, cursor.Take<uint64_t>());
    if (!std::in_range<int64_t>(dimension)) return cursor.Error("a dimension above 2^63");
    tensor.shape[num_dimensions - 1 - i] = static_cast<int64_t>(dimension);
  }
  ASSIGN_OR_RETURN(const uint32_t type_id, cursor.Take<uint32_t>());
  ASSIGN_OR_RETURN(const uint64_t offset, cursor.Take<uint64_t>());
  if (!std::in_range<int64_t>(offset) || offset % static_cast<uint64_t>(alignment) != 0) {
    return cursor.Error(
        absl::StrCat("data offset ", offset, " is not a multiple of the alignment ", alignment));
  }
  tensor.offset = static_cast<int64_t>(offset);
  return SizeTensor(cursor, type_id, tensor);
}

absl::Status ParseTensors(Cursor& cursor, uint64_t count, int64_t alignment, GgufFile& file) {
  absl::flat_hash_set<absl::string_view> names;
  for (uint64_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(const absl::string_view name, cursor.TakeString());
    if (!names.insert(name).second) {
      return cursor.Error(absl::StrCat("tensor ", name, " is given twice"));
    }
    StoredTensor& tensor = file.tensors.emplace_back();
    tensor.name = std::string(name);
    const absl::Status status = TakeTensor(cursor, alignment, tensor);
    if (!status.ok()) return Annotate(status, absl::StrCat("tensor ", name));
  }
  const int64_t data_begin = RoundUp(cursor.offset(), alignment);
  for (StoredTensor& tensor : file.tensors) {
    if (__builtin_add_overflow(tensor.offset, data_begin, &tensor.offset)) {
      return cursor.Error(absl::StrCat("the offset of tensor ", tensor.name, " overflows"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> TakeVersion(Cursor& cursor, absl::string_view contents) {
  const auto magic = cursor.TakeBytes(4);
  if (!magic.ok() || *magic != "GGUF") {
    const std::string guess = GuessFileFault(contents);
    return absl::InvalidArgumentError(absl::StrCat("not a GGUF file: its ", contents.size(),
                                                   " bytes do not begin with \"GGUF\"",
                                                   guess.empty() ? "" : "; ", guess));
  }
  ASSIGN_OR_RETURN(const uint32_t version, cursor.Take<uint32_t>());
  if (version == 2 || version == 3) return version;
  if (__builtin_bswap32(version) == 3) return cursor.Error("a big-endian file; convert it");
  return cursor.Error(absl::StrCat("version ", version, " is not supported; 2 and 3 are"));
}

// Types without a size here would read as gaps or trailing bytes; their names say more.
absl::Status CheckTypes(const GgufFile& file) {
  std::set<std::string> unsupported;
  for (const StoredTensor& tensor : file.tensors) {
    if (!tensor.dtype) unsupported.insert(tensor.type_name);
  }
  if (unsupported.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tensors are stored as ", absl::StrJoin(unsupported, ", "),
      "; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K"));
}

absl::StatusOr<GgufFile> ParseContents(absl::string_view contents) {
  Cursor cursor(contents);
  GgufFile file;
  ASSIGN_OR_RETURN(file.version, TakeVersion(cursor, contents));
  // Smallest entries: name length, one dimension, type and offset; key length, type and a byte.
  ASSIGN_OR_RETURN(const uint64_t num_tensors, cursor.TakeCount("tensors", 32));
  ASSIGN_OR_RETURN(const uint64_t num_keys, cursor.TakeCount("metadata keys", 13));
  RETURN_IF_ERROR(ParseMetadata(cursor, num_keys, file));
  ASSIGN_OR_RETURN(const int64_t alignment, Alignment(file, cursor));
  RETURN_IF_ERROR(ParseTensors(cursor, num_tensors, alignment, file));
  RETURN_IF_ERROR(CheckTypes(file));
  const int64_t data_begin = RoundUp(cursor.offset(), alignment);
  const auto file_size = static_cast<int64_t>(contents.size());
  // Without tensors the file may end before its padding.
  RETURN_IF_ERROR(CheckSpans(file.tensors, std::min(data_begin, file_size), file_size, alignment));
  return file;
}

}  // namespace

std::string GgufValue::TypeName() const {
  return absl::StrCat(is_array_ ? "array of " : "", ScalarName(element_type_));
}

std::optional<int64_t> GgufValue::Integer() const {
  if (is_array_) return std::nullopt;
  return LoadInteger(element_type_, bytes_.data());
}

std::optional<double> GgufValue::Number() const {
  if (is_array_) return std::nullopt;
  return LoadNumber(element_type_, bytes_.data());
}

std::optional<bool> GgufValue::Bool() const {
  if (is_array_ || element_type_ != GgufType::kBool) return std::nullopt;
  return bytes_[0] != 0;
}

std::optional<absl::string_view> GgufValue::String() const {
  if (is_array_ || element_type_ != GgufType::kString) return std::nullopt;
  return bytes_.substr(sizeof(uint64_t));
}

std::optional<std::vector<int64_t>> GgufValue::Integers() const {
  if (!is_array_ || !IsInteger(element_type_)) return std::nullopt;
  std::vector<int64_t> integers;
  integers.reserve(count_);
  for (uint64_t i = 0; i < count_; ++i) {
    const auto integer = LoadInteger(element_type_, bytes_.data() + i * ScalarBytes(element_type_));
    if (!integer) return std::nullopt;
    integers.push_back(*integer);
  }
  return integers;
}

std::optional<std::vector<float>> GgufValue::Floats() const {
  if (!is_array_ || !IsFloat(element_type_)) return std::nullopt;
  std::vector<float> floats;
  floats.reserve(count_);
  for (uint64_t i = 0; i < count_; ++i) {
    floats.push_back(static_cast<float>(
        *LoadNumber(element_type_, bytes_.data() + i * ScalarBytes(element_type_))));
  }
  return floats;
}

std::optional<std::vector<absl::string_view>> GgufValue::Strings() const {
  if (!is_array_ || element_type_ != GgufType::kString) return std::nullopt;
  std::vector<absl::string_view> strings;
  strings.reserve(count_);
  absl::string_view rest = bytes_;
  for (uint64_t i = 0; i < count_; ++i) {
    const auto length = Load<uint64_t>(rest.data());
    strings.push_back(rest.substr(sizeof(uint64_t), length));
    rest.remove_prefix(sizeof(uint64_t) + length);
  }
  return strings;
}

absl::StatusOr<GgufFile> ParseGguf(absl::string_view contents, absl::string_view file_name) {
  absl::StatusOr<GgufFile> file = ParseContents(contents);
  if (!file.ok()) return Annotate(file.status(), file_name);
  return file;
}

}  // namespace heddle
