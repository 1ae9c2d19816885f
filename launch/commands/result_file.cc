#include "launch/commands/result_file.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heddle {

absl::StatusOr<std::unique_ptr<ResultFile>> ResultFile::Open(const std::string& path) {
  std::FILE* file = path == "-" ? stdout : std::fopen(path.c_str(), "w");
  if (file == nullptr) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot write \"", path, "\": ", std::strerror(errno)));
  }
  return std::unique_ptr<ResultFile>(new ResultFile(path, file));
}

ResultFile::~ResultFile() {
  if (file_ != nullptr && file_ != stdout) std::fclose(file_);
}

void ResultFile::WriteLine(absl::string_view text) {
  failed_ |= std::fwrite(text.data(), 1, text.size(), file_) != text.size();
  failed_ |= std::fputc('\n', file_) == EOF;
}

absl::Status ResultFile::Close() {
  std::FILE* file = std::exchange(file_, nullptr);
  failed_ |= (file == stdout ? std::fflush(file) : std::fclose(file)) != 0;
  if (failed_) return absl::DataLossError(absl::StrCat("could not write all of \"", path_, "\""));
  return absl::OkStatus();
}

}  // namespace heddle
