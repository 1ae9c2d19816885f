// JSON output that stays exact and small: floats in the fewest digits that read back the same.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/strings/string_view.h"

namespace heddle {

// "text" with quotes and escapes; bytes that are not UTF-8 become U+FFFD.
void AppendJsonString(absl::string_view text, std::string& json);
// Never NaN or infinite in JSON: those become null.
void AppendJsonFloat(float value, std::string& json);
void AppendJsonIds(std::span<const int32_t> ids, std::string& json);
void AppendJsonFloats(std::span<const float> values, std::string& json);

}  // namespace heddle
