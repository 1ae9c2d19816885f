// Files that tests write: safetensors and GGUF, well formed or not.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace heddle {

// Under the system's temporary directory; removed with everything in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory();

  const std::string& path() const { return path_; }
  std::string Write(absl::string_view name, absl::string_view contents) const;  // gives its path

 private:
  std::string path_;
};

std::string ReadFile(const std::string& path);
void CopyDirectory(const std::string& from, const TemporaryDirectory& to);

// The bytes of a number as they lie in memory.
template <typename T>
std::string Bytes(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// 8 bytes of length, `header`, `data`.
std::string SafetensorsFile(absl::string_view header, absl::string_view data);

// A GGUF file piece by piece; nothing stops a test from making a bad one.
class GgufBuilder {
 public:
  GgufBuilder& String(absl::string_view key, absl::string_view value);
  GgufBuilder& Uint32(absl::string_view key, uint32_t value);
  GgufBuilder& Float32(absl::string_view key, float value);
  GgufBuilder& Bool(absl::string_view key, bool value);
  GgufBuilder& Strings(absl::string_view key, const std::vector<std::string>& values);
  GgufBuilder& Raw(absl::string_view key, uint32_t type, absl::string_view bytes);

  // `shape` as Heddle writes it, [rows, cols]; the data is aligned as the format asks.
  GgufBuilder& Tensor(absl::string_view name, const std::vector<int64_t>& shape, uint32_t type,
                      absl::string_view data);
  // A description alone, its dimensions and offset as they go into the file.
  GgufBuilder& RawTensor(absl::string_view name, const std::vector<uint64_t>& dimensions,
                         uint32_t type, uint64_t offset);

  std::string Build(uint32_t version = 3) const;
  // Everything before the tensor data, with counts of one's own.
  std::string BuildHeader(uint32_t version, uint64_t num_tensors, uint64_t num_keys) const;

 private:
  uint64_t num_keys_ = 0;
  uint64_t num_tensors_ = 0;
  std::string metadata_;
  std::string tensors_;
  std::string data_;
};

}  // namespace heddle
