#include "runtime/text/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace heddle {
namespace {

// fallback[n]: the longest proper prefix of text[0, n) that is also its suffix.
std::vector<size_t> Borders(absl::string_view text) {
  std::vector<size_t> borders(text.size() + 1, 0);
  for (size_t n = 1, border = 0; n < text.size(); ++n) {
    while (border > 0 && text[border] != text[n]) border = borders[border];
    if (text[border] == text[n]) ++border;
    borders[n + 1] = border;
  }
  return borders;
}

}  // namespace

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  std::erase_if(stops, [](const std::string& stop) { return stop.empty(); });
  for (std::string& stop : stops) {
    std::vector<size_t> fallback = Borders(stop);
    stops_.push_back({std::move(stop), std::move(fallback)});
  }
  // The first to match at a byte is then the longest.
  std::stable_sort(stops_.begin(), stops_.end(),
                   [](const Stop& a, const Stop& b) { return a.text.size() > b.text.size(); });
}

std::string StopMatcher::Push(absl::string_view text, bool may_stop) {
  if (matched_.has_value()) return "";
  for (const char c : text) {
    held_ += c;
    for (Stop& stop : stops_) {
      size_t& n = stop.num_matched;
      while (n > 0 && stop.text[n] != c) n = stop.fallback[n];
      if (stop.text[n] == c) ++n;
      if (n < stop.text.size()) continue;
      if (may_stop) {
        matched_ = stop.text;
        return held_.substr(0, held_.size() - stop.text.size());
      }
      n = stop.fallback[n];
    }
  }
  held_pieces_.push_back(text.size());

  size_t num_waiting = 0;  // Bytes at the end in which a stop string may have begun.
  for (const Stop& stop : stops_) num_waiting = std::max(num_waiting, stop.num_matched);
  size_t num_free = 0;
  while (!held_pieces_.empty() && num_free + held_pieces_.front() + num_waiting <= held_.size()) {
    num_free += held_pieces_.front();
    held_pieces_.pop_front();
  }
  std::string free = held_.substr(0, num_free);
  held_.erase(0, num_free);
  return free;
}

std::string StopMatcher::Flush() {
  if (matched_.has_value()) return "";
  held_pieces_.clear();
  for (Stop& stop : stops_) stop.num_matched = 0;
  return std::exchange(held_, "");
}

std::vector<int32_t> SpecialStopIds(const Tokenizer& tokenizer,
                                    std::span<const std::string> stops) {
  std::vector<int32_t> ids;
  for (const std::string& stop : stops) {
    const std::optional<int32_t> id = tokenizer.TokenId(stop);
    if (id.has_value() && tokenizer.IsSpecial(*id)) ids.push_back(*id);
  }
  return ids;
}

}  // namespace heddle
