// Where a command's JSON lines go.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// A file or, for "-", stdout. Opened before the work that fills it. Not thread-safe.
class ResultFile {
 public:
  // PermissionDenied, with the system's reason, if the file cannot be written.
  static absl::StatusOr<std::unique_ptr<ResultFile>> Open(const std::string& path);
  ~ResultFile();
  ResultFile(const ResultFile&) = delete;
  ResultFile& operator=(const ResultFile&) = delete;

  // Writes the text and a line feed.
  void WriteLine(absl::string_view text);
  // DataLoss if anything could not be written.
  absl::Status Close();

 private:
  ResultFile(std::string path, std::FILE* file) : path_(std::move(path)), file_(file) {}

  std::string path_;
  std::FILE* file_;
  bool failed_ = false;
};

}  // namespace heddle
