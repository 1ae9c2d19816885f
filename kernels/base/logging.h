// LOG and CHECK with the names of absl/log, which Debian's Abseil does not carry yet.
//
// LOG(INFO) << ...;       one line on stderr: "[rank r host] I file:line text"
// CHECK(cond) << ...;     aborts on a broken invariant; never used for bad input
// Only this file and its .cc hold process-wide state: the prefix and the level.
#pragma once

#include <sstream>

#include "absl/strings/string_view.h"

namespace heddle {

enum class LogSeverity { kInfo = 0, kWarning = 1, kError = 2, kFatal = 3 };

// The text inside the brackets, e.g. "rank 3 node7". Set once at process start.
void SetLogPrefix(absl::string_view prefix);
// Messages below `severity` are dropped. Ranks other than 0 start at kWarning.
void SetMinLogSeverity(LogSeverity severity);

namespace logging_internal {

class LogMessage {
 public:
  LogMessage(LogSeverity severity, const char* file, int line);
  LogMessage(const LogMessage&) = delete;
  LogMessage& operator=(const LogMessage&) = delete;
  ~LogMessage();  // Writes the line; aborts if fatal.
  std::ostream& stream() { return stream_; }

 private:
  LogSeverity severity_;
  const char* file_;
  int line_;
  std::ostringstream stream_;
};

class FatalMessage {
 public:
  FatalMessage(const char* file, int line) : message_(LogSeverity::kFatal, file, line) {}
  std::ostream& stream() { return message_.stream(); }

 private:
  LogMessage message_;
};

struct Voidify {
  void operator&(std::ostream&) {}
};

}  // namespace logging_internal
}  // namespace heddle

#define HEDDLE_LOG_INFO \
  ::heddle::logging_internal::LogMessage(::heddle::LogSeverity::kInfo, __FILE__, __LINE__)
#define HEDDLE_LOG_WARNING \
  ::heddle::logging_internal::LogMessage(::heddle::LogSeverity::kWarning, __FILE__, __LINE__)
#define HEDDLE_LOG_ERROR \
  ::heddle::logging_internal::LogMessage(::heddle::LogSeverity::kError, __FILE__, __LINE__)
#define HEDDLE_LOG_FATAL ::heddle::logging_internal::FatalMessage(__FILE__, __LINE__)
#define LOG(severity) HEDDLE_LOG_##severity.stream()

#define CHECK(condition)                                                          \
  (__builtin_expect(static_cast<bool>(condition), 1))                             \
      ? (void)0                                                                   \
      : ::heddle::logging_internal::Voidify() &                                   \
            ::heddle::logging_internal::FatalMessage(__FILE__, __LINE__).stream() \
                << "CHECK failed: " #condition " "
#define HEDDLE_CHECK_OP(op, a, b) CHECK((a)op(b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_EQ(a, b) HEDDLE_CHECK_OP(==, a, b)
#define CHECK_NE(a, b) HEDDLE_CHECK_OP(!=, a, b)
#define CHECK_LE(a, b) HEDDLE_CHECK_OP(<=, a, b)
#define CHECK_LT(a, b) HEDDLE_CHECK_OP(<, a, b)
#define CHECK_GE(a, b) HEDDLE_CHECK_OP(>=, a, b)
#define CHECK_GT(a, b) HEDDLE_CHECK_OP(>, a, b)
#define CHECK_OK(expression)                                           \
  do {                                                                 \
    const ::absl::Status heddle_check_status = (expression);           \
    CHECK(heddle_check_status.ok()) << heddle_check_status.ToString(); \
  } while (false)
