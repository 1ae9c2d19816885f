// How far a command is: a bar on a terminal, a line every tenth otherwise, on stderr.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

namespace heddle {

// Thread-safe. Says nothing about fewer than eight items.
class Progress {
 public:
  explicit Progress(std::string what) : what_(std::move(what)) {}

  void Expect(int64_t total);
  void Advance();
  // Ends the bar's line.
  void Finish();

 private:
  const std::string what_;
  std::mutex mutex_;
  int64_t total_ = 0;
  int64_t done_ = 0;
  int64_t tenths_shown_ = 0;
};

}  // namespace heddle
