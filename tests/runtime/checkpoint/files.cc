#include "tests/runtime/checkpoint/files.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

constexpr size_t kAlignment = 32;

std::string Sized(absl::string_view text) {
  return absl::StrCat(Bytes<uint64_t>(text.size()), text);
}

void PadTo(size_t multiple, std::string& bytes) {
  bytes.resize((bytes.size() + multiple - 1) / multiple * multiple);
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  path_ = (std::filesystem::temp_directory_path() / "heddle-test-XXXXXX").string();
  CHECK(mkdtemp(path_.data()) != nullptr);
}

TemporaryDirectory::~TemporaryDirectory() { std::filesystem::remove_all(path_); }

std::string TemporaryDirectory::Write(absl::string_view name, absl::string_view contents) const {
  const std::string path = absl::StrCat(path_, "/", name);
  std::ofstream file(path, std::ios::binary);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  CHECK(file.good());
  return path;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void CopyDirectory(const std::string& from, const TemporaryDirectory& to) {
  std::filesystem::copy(from, to.path());
}

std::string SafetensorsFile(absl::string_view header, absl::string_view data) {
  return absl::StrCat(Sized(header), data);
}

GgufBuilder& GgufBuilder::Raw(absl::string_view key, uint32_t type, absl::string_view bytes) {
  absl::StrAppend(&metadata_, Sized(key), Bytes(type), bytes);
  ++num_keys_;
  return *this;
}

GgufBuilder& GgufBuilder::String(absl::string_view key, absl::string_view value) {
  return Raw(key, 8, Sized(value));
}

GgufBuilder& GgufBuilder::Uint32(absl::string_view key, uint32_t value) {
  return Raw(key, 4, Bytes(value));
}

GgufBuilder& GgufBuilder::Float32(absl::string_view key, float value) {
  return Raw(key, 6, Bytes(value));
}

GgufBuilder& GgufBuilder::Bool(absl::string_view key, bool value) {
  return Raw(key, 7, Bytes(value));
}

GgufBuilder& GgufBuilder::Strings(absl::string_view key, const std::vector<std::string>& values) {
  std::string bytes = absl::StrCat(Bytes<uint32_t>(8), Bytes<uint64_t>(values.size()));
  for (const std::string& value : values) absl::StrAppend(&bytes, Sized(value));
  return Raw(key, 9, bytes);
}

GgufBuilder& GgufBuilder::Tensor(absl::string_view name, const std::vector<int64_t>& shape,
                                 uint32_t type, absl::string_view data) {
  PadTo(kAlignment, data_);
  RawTensor(name, {shape.rbegin(), shape.rend()}, type, data_.size());
  absl::StrAppend(&data_, data);
  return *this;
}

GgufBuilder& GgufBuilder::RawTensor(absl::string_view name, const std::vector<uint64_t>& dimensions,
                                    uint32_t type, uint64_t offset) {
  absl::StrAppend(&tensors_, Sized(name), Bytes(static_cast<uint32_t>(dimensions.size())));
  for (const uint64_t dimension : dimensions) absl::StrAppend(&tensors_, Bytes(dimension));
  absl::StrAppend(&tensors_, Bytes(type), Bytes(offset));
  ++num_tensors_;
  return *this;
}

std::string GgufBuilder::BuildHeader(uint32_t version, uint64_t num_tensors,
                                     uint64_t num_keys) const {
  return absl::StrCat("GGUF", Bytes(version), Bytes(num_tensors), Bytes(num_keys), metadata_,
                      tensors_);
}

std::string GgufBuilder::Build(uint32_t version) const {
  std::string file = BuildHeader(version, num_tensors_, num_keys_);
  PadTo(kAlignment, file);
  return file + data_;
}

}  // namespace heddle
