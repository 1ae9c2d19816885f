#include "runtime/checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

absl::Status SystemError(absl::string_view what, const std::string& path) {
  const std::string text = absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(errno));
  return errno == ENOENT ? absl::NotFoundError(text) : absl::InvalidArgumentError(text);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return SystemError("open", path);
  struct stat info;
  if (fstat(file.get(), &info) != 0) return SystemError("examine", path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  absl::string_view contents;
  if (info.st_size > 0) {
    const auto size = static_cast<size_t>(info.st_size);
    void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
    if (data == MAP_FAILED) return SystemError("map", path);
    contents = absl::string_view(static_cast<const char*>(data), size);
  }
  return std::shared_ptr<const MappedFile>(new MappedFile(path, contents));
}

MappedFile::~MappedFile() {
  if (!contents_.empty()) munmap(const_cast<char*>(contents_.data()), contents_.size());
}

void MappedFile::WillNeed(int64_t offset, int64_t bytes) const {
  if (bytes <= 0) return;
  const int64_t begin = offset - offset % sysconf(_SC_PAGESIZE);
  // Advice: a refusal costs speed alone.
  madvise(const_cast<char*>(contents_.data()) + begin, offset + bytes - begin, MADV_WILLNEED);
}

void MappedFile::DontNeed(int64_t offset, int64_t bytes) const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t begin = (offset + page - 1) / page * page;
  const int64_t end = (offset + bytes) / page * page;
  if (end > begin) {
    madvise(const_cast<char*>(contents_.data()) + begin, end - begin, MADV_DONTNEED);
  }
}

std::string GuessFileFault(absl::string_view contents) {
  const absl::string_view start = contents.substr(0, 256);
  if (contents.empty()) return "the file is empty: was its download interrupted?";
  if (absl::StartsWith(start, "version https://git-lfs")) {
    return "it is a Git LFS pointer, not the file itself: run `git lfs pull`";
  }
  if (absl::StartsWithIgnoreCase(start, "<!doctype html") ||
      absl::StartsWithIgnoreCase(start, "<html")) {
    return "it is a web page: did the download need a login?";
  }
  if (absl::StartsWith(start, "GGUF")) return "it is a GGUF file: give its path with --model";
  if (absl::StartsWith(start, absl::string_view("PK\x03\x04", 4))) {
    return "it is a zip archive, perhaps a PyTorch checkpoint: convert it to safetensors";
  }
  if (std::all_of(start.begin(), start.end(), [](char c) { return c == '\0'; })) {
    return "it begins with zeros: was its download interrupted?";
  }
  return "";
}

}  // namespace heddle
