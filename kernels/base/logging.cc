#include "kernels/base/logging.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace heddle {
namespace {

std::mutex prefix_mutex;
std::string& Prefix() {
  static std::string* const prefix = new std::string("rank 0");
  return *prefix;
}
std::atomic<int> min_severity{static_cast<int>(LogSeverity::kInfo)};

}  // namespace

void SetLogPrefix(absl::string_view prefix) {
  const std::lock_guard<std::mutex> lock(prefix_mutex);
  Prefix() = std::string(prefix);
}

void SetMinLogSeverity(LogSeverity severity) { min_severity = static_cast<int>(severity); }

namespace logging_internal {

LogMessage::LogMessage(LogSeverity severity, const char* file, int line)
    : severity_(severity), file_(file), line_(line) {}

LogMessage::~LogMessage() {
  if (static_cast<int>(severity_) >= min_severity.load()) {
    static constexpr char kLetters[] = "IWEF";
    const char* slash = std::strrchr(file_, '/');
    std::string line;
    {
      const std::lock_guard<std::mutex> lock(prefix_mutex);
      line = "[" + Prefix() + "] ";
    }
    line += kLetters[static_cast<int>(severity_)];
    line += ' ';
    line += slash != nullptr ? slash + 1 : file_;
    line += ':' + std::to_string(line_) + "] " + stream_.str() + '\n';
    // One write, so that lines of several ranks do not mix.
    std::fwrite(line.data(), 1, line.size(), stderr);
    std::fflush(stderr);
  }
  if (severity_ == LogSeverity::kFatal) std::abort();
}

}  // namespace logging_internal
}  // namespace heddle
