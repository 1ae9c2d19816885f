#include "launch/commands/progress.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdio>

namespace heddle {
namespace {

constexpr int64_t kFewItems = 8;
constexpr int64_t kBarWidth = 30;

bool OnTerminal() { return isatty(STDERR_FILENO) == 1; }

}  // namespace

void Progress::Expect(int64_t total) {
  const std::lock_guard<std::mutex> lock(mutex_);
  total_ = total;
}

void Progress::Advance() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++done_;
  if (total_ < kFewItems) return;
  if (OnTerminal()) {
    const std::string bar(static_cast<size_t>(kBarWidth * done_ / total_), '#');
    std::fprintf(stderr, "\r%s [%-*s] %" PRId64 "/%" PRId64, what_.c_str(),
                 static_cast<int>(kBarWidth), bar.c_str(), done_, total_);
    std::fflush(stderr);
    return;
  }
  const int64_t tenths = 10 * done_ / total_;
  if (tenths == tenths_shown_) return;
  tenths_shown_ = tenths;
  std::fprintf(stderr, "%s: %" PRId64 " of %" PRId64 "\n", what_.c_str(), done_, total_);
}

void Progress::Finish() {
  if (total_ >= kFewItems && OnTerminal()) std::fputc('\n', stderr);
}

}  // namespace heddle
