#include "launch/json_text.h"

#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace heddle {

void AppendJsonString(absl::string_view text, std::string& json) {
  json += nlohmann::json(std::string(text))
              .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void AppendJsonFloat(float value, std::string& json) {
  if (!std::isfinite(value)) {
    json += "null";
    return;
  }
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof(digits), value);
  json.append(digits, end);
}

void AppendJsonIds(std::span<const int32_t> ids, std::string& json) {
  json += '[';
  for (size_t i = 0; i < ids.size(); ++i) absl::StrAppend(&json, i > 0 ? "," : "", ids[i]);
  json += ']';
}

void AppendJsonFloats(std::span<const float> values, std::string& json) {
  json += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) json += ',';
    AppendJsonFloat(values[i], json);
  }
  json += ']';
}

}  // namespace heddle
