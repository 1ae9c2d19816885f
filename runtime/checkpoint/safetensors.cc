#include "runtime/checkpoint/safetensors.h"

#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "runtime/checkpoint/mapped_file.h"
#include "simdjson.h"

namespace heddle {
namespace {

using simdjson::dom::array;
using simdjson::dom::element;
using simdjson::dom::object;

constexpr int64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxHeaderDepth = 16;
constexpr size_t kMaxDimensions = 8;

struct TypeTraits {
  absl::string_view name;
  int64_t bits;
  std::optional<DType> dtype;
};

constexpr TypeTraits kTypes[] = {
    {"F32", 32, DType::kFloat32}, {"BF16", 16, DType::kBFloat16},
    {"F16", 16, DType::kFloat16}, {"I64", 64, DType::kInt64},
    {"I32", 32, DType::kInt32},   {"I8", 8, DType::kInt8},
    {"U8", 8, DType::kUint8},     {"BOOL", 8, DType::kBool},
    {"F64", 64, std::nullopt},    {"U64", 64, std::nullopt},
    {"U32", 32, std::nullopt},    {"I16", 16, std::nullopt},
    {"U16", 16, std::nullopt},    {"F8_E4M3", 8, DType::kFloat8E4M3},
    {"F8_E5M2", 8, std::nullopt}, {"F8_E8M0", 8, std::nullopt},
    {"F4", 4, std::nullopt},      {"C64", 64, std::nullopt},
};

const TypeTraits* FindType(absl::string_view name) {
  for (const TypeTraits& traits : kTypes) {
    if (traits.name == name) return &traits;
  }
  return nullptr;
}

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

// Non-negative integers, at most `limit` of them.
bool ReadIntegers(const element& value, size_t limit, std::vector<int64_t>& integers) {
  array list;
  if (value.get(list) != simdjson::SUCCESS || list.size() > limit) return false;
  for (const element entry : list) {
    int64_t integer;
    if (entry.get(integer) != simdjson::SUCCESS || integer < 0) return false;
    integers.push_back(integer);
  }
  return true;
}

// The fields of one header entry; `error` names the first that is wrong.
class EntryParser {
 public:
  EntryParser(int64_t data_begin, StoredTensor& tensor)
      : data_begin_(data_begin), tensor_(tensor) {}

  absl::Status Parse(const element& value) {
    object fields;
    if (value.get(fields) != simdjson::SUCCESS) return Error("its entry is not an object");
    for (const auto field : fields) {
      RETURN_IF_ERROR(ParseField(View(field.key), field.value));
    }
    if (!has_type_ || !has_shape_ || !has_offsets_) {
      return Error("its entry lacks dtype, shape or data_offsets");
    }
    const TypeTraits* type = FindType(tensor_.type_name);
    if (type == nullptr) return Error(absl::StrCat("unknown dtype \"", tensor_.type_name, "\""));
    tensor_.dtype = type->dtype;

    const std::optional<int64_t> elements = CountElements(tensor_.shape);
    int64_t bits;
    if (!elements || __builtin_mul_overflow(*elements, type->bits, &bits)) {
      return Error(absl::StrCat("the size of shape ", ShapeName(tensor_.shape), " overflows"));
    }
    if (bits % 8 != 0 || bits / 8 != tensor_.bytes) {
      return Error(absl::StrCat("shape ", ShapeName(tensor_.shape), " of ", tensor_.type_name,
                                " takes ", (bits + 7) / 8, " bytes, data_offsets span ",
                                tensor_.bytes));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Error(absl::string_view text) const {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor_.name, ": ", text));
  }

  absl::Status ParseField(absl::string_view key, const element& value) {
    if (key == "dtype") {
      std::string_view type_name;
      if (value.get(type_name) != simdjson::SUCCESS) return Error("dtype is not a string");
      if (std::exchange(has_type_, true)) return Error("dtype is given twice");
      tensor_.type_name = std::string(type_name);
    } else if (key == "shape") {
      if (std::exchange(has_shape_, true)) return Error("shape is given twice");
      if (!ReadIntegers(value, kMaxDimensions, tensor_.shape)) {
        return Error(absl::StrCat("shape is not a list of at most ", kMaxDimensions,
                                  " non-negative integers"));
      }
    } else if (key == "data_offsets") {
      if (std::exchange(has_offsets_, true)) return Error("data_offsets is given twice");
      std::vector<int64_t> offsets;
      if (!ReadIntegers(value, 2, offsets) || offsets.size() != 2 || offsets[0] > offsets[1]) {
        return Error("data_offsets is not a pair of ascending, non-negative integers");
      }
      tensor_.bytes = offsets[1] - offsets[0];
      if (__builtin_add_overflow(offsets[0], data_begin_, &tensor_.offset)) {
        return Error("data_offsets overflow");
      }
    }
    return absl::OkStatus();
  }

  int64_t data_begin_;
  StoredTensor& tensor_;
  bool has_type_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
};

// The format leaves no byte between tensors unused.
absl::Status CheckNoGaps(const std::vector<StoredTensor>& tensors, int64_t data_begin,
                         int64_t file_size) {
  int64_t total = data_begin;
  for (const StoredTensor& tensor : tensors) total += tensor.bytes;  // disjoint: cannot overflow
  if (total == file_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(file_size - total, " bytes between tensors belong to none of them"));
}

absl::StatusOr<absl::string_view> FindHeader(absl::string_view contents) {
  const auto error = [&](absl::string_view text) {
    const std::string guess = GuessFileFault(contents);
    return absl::InvalidArgumentError(
        absl::StrCat("not a safetensors file: ", text, guess.empty() ? "" : "; ", guess));
  };
  if (contents.size() < kLengthBytes) {
    return error(absl::StrCat("expected a header of at least ", kLengthBytes, " bytes, found ",
                              contents.size(), " bytes"));
  }
  uint64_t header_bytes;  // little-endian, as are the machines Heddle runs on
  std::memcpy(&header_bytes, contents.data(), sizeof(header_bytes));
  const absl::string_view rest = contents.substr(kLengthBytes);
  if (header_bytes > kMaxHeaderBytes || header_bytes > rest.size()) {
    return error(absl::StrCat("expected a header of ", header_bytes, " bytes (at most ",
                              kMaxHeaderBytes, "), found ", rest.size(), " bytes"));
  }
  const absl::string_view header = rest.substr(0, header_bytes);
  if (header.empty() || header[0] != '{') return error("its header is not a JSON object");
  return header;
}

absl::StatusOr<std::vector<StoredTensor>> ParseContents(absl::string_view contents) {
  ASSIGN_OR_RETURN(const absl::string_view header, FindHeader(contents));
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(header.size());

  simdjson::dom::parser parser;
  simdjson::error_code error = parser.allocate(header.size(), kMaxHeaderDepth);
  object root;
  if (error == simdjson::SUCCESS) error = parser.parse(header.data(), header.size()).get(root);
  if (error != simdjson::SUCCESS) {
    return absl::InvalidArgumentError(absl::StrCat("bad header: ", simdjson::error_message(error)));
  }

  std::vector<StoredTensor> tensors;
  absl::flat_hash_set<absl::string_view> names;  // they live in the parser
  for (const auto field : root) {
    if (!names.insert(View(field.key)).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("bad header: ", View(field.key), " is given twice"));
    }
    if (field.key == "__metadata__") continue;
    StoredTensor& tensor = tensors.emplace_back();
    tensor.name = std::string(field.key);
    RETURN_IF_ERROR(EntryParser(data_begin, tensor).Parse(field.value));
  }
  const auto file_size = static_cast<int64_t>(contents.size());
  RETURN_IF_ERROR(CheckSpans(tensors, data_begin, file_size, /*alignment=*/1));
  RETURN_IF_ERROR(CheckNoGaps(tensors, data_begin, file_size));
  return tensors;
}

}  // namespace

absl::StatusOr<std::vector<StoredTensor>> ParseSafetensors(absl::string_view contents,
                                                           absl::string_view file_name) {
  absl::StatusOr<std::vector<StoredTensor>> tensors = ParseContents(contents);
  if (!tensors.ok()) return Annotate(tensors.status(), file_name);
  return tensors;
}

}  // namespace heddle
