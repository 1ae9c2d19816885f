// Lines that are finished in any order and written in input order.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "launch/commands/result_file.h"

namespace heddle {

// Thread-safe.
class OrderedLines {
 public:
  explicit OrderedLines(ResultFile& file) : file_(file) {}

  // Each place once; written as soon as all before it are.
  void Put(size_t place, std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_[place] = std::move(text);
    for (auto next = waiting_.begin(); next != waiting_.end() && next->first == num_written_;
         next = waiting_.erase(next), ++num_written_) {
      file_.WriteLine(next->second);
    }
  }

 private:
  ResultFile& file_;
  std::mutex mutex_;
  std::map<size_t, std::string> waiting_;
  size_t num_written_ = 0;
};

}  // namespace heddle
