// A file in memory, read-only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// Unmapped when the last slice that borrows from it is gone. Pages enter memory as they are
// touched. A file that somebody shortens while it is mapped kills the process (SIGBUS).
class MappedFile {
 public:
  // NotFound or InvalidArgument unless `path` is a readable regular file. May be empty.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  absl::string_view contents() const { return contents_; }

  // Starts reading a span from disk, without waiting.
  void WillNeed(int64_t offset, int64_t bytes) const;
  // Takes the pages that lie wholly inside a span out of the resident set.
  void DontNeed(int64_t offset, int64_t bytes) const;

 private:
  MappedFile(std::string path, absl::string_view contents)
      : path_(std::move(path)), contents_(contents) {}

  std::string path_;
  absl::string_view contents_;
};

// A guess at why `contents` is not what its name promises ("a Git LFS pointer, not the file
// itself: …"), or "" if nothing comes to mind.
std::string GuessFileFault(absl::string_view contents);

}  // namespace heddle
