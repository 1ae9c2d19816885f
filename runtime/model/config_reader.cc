#include "runtime/model/config_reader.h"

#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

using nlohmann::json;

// The value as the file spells it, cut short.
std::string Quote(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = absl::StrCat(text.substr(0, 57), "...");
  return text;
}

// An integer that fits 64 signed bits.
bool IsInteger(const json& value) {
  if (value.is_number_unsigned()) {
    return value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  }
  return value.is_number_integer();
}

}  // namespace

bool ConfigReader::HasKey(absl::string_view key) const {
  return object_.contains(std::string(key));
}

const json* ConfigReader::Find(absl::string_view key) const {
  const auto it = object_.find(std::string(key));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void ConfigReader::AddProblem(absl::string_view key, absl::string_view text) const {
  std::string problem = absl::StrCat(path_, key, ": ", text);
  if (!absl::c_linear_search(problems_, problem)) problems_.push_back(std::move(problem));
}

void ConfigReader::AddTypeProblem(absl::string_view key, absl::string_view expected,
                                  const json& found) const {
  AddProblem(key, absl::StrCat("expected ", expected, ", found the ", found.type_name(), " ",
                               Quote(found)));
}

std::optional<int64_t> ConfigReader::Integer(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (IsInteger(*value)) return value->get<int64_t>();
  AddTypeProblem(key, "a whole number", *value);
  return std::nullopt;
}

std::optional<double> ConfigReader::Number(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) return value->get<double>();
  AddTypeProblem(key, "a number", *value);
  return std::nullopt;
}

std::optional<bool> ConfigReader::Bool(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  AddTypeProblem(key, "true or false", *value);
  return std::nullopt;
}

std::optional<std::string> ConfigReader::String(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->get<std::string>();
  AddTypeProblem(key, "a string", *value);
  return std::nullopt;
}

const json* ConfigReader::Object(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr || value->is_object()) return value;
  AddTypeProblem(key, "an object", *value);
  return nullptr;
}

std::vector<int64_t> ConfigReader::Integers(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr) return {};
  if (IsInteger(*value)) return {value->get<int64_t>()};
  std::vector<int64_t> integers;
  bool valid = value->is_array();
  if (valid) {
    for (const json& element : *value) {
      valid = valid && IsInteger(element);
      if (valid) integers.push_back(element.get<int64_t>());
    }
  }
  if (valid) return integers;
  AddTypeProblem(key, "a whole number or a list of them", *value);
  return {};
}

std::vector<std::string> ConfigReader::Strings(absl::string_view key) const {
  const json* value = Find(key);
  if (value == nullptr) return {};
  std::vector<std::string> strings;
  bool valid = value->is_array();
  if (valid) {
    for (const json& element : *value) {
      valid = valid && element.is_string();
      if (valid) strings.push_back(element.get<std::string>());
    }
  }
  if (valid) return strings;
  AddTypeProblem(key, "a list of strings", *value);
  return {};
}

int64_t ConfigReader::RequiredInteger(absl::string_view key) const {
  if (Find(key) == nullptr) {
    AddProblem(key, "missing");
    return 0;
  }
  return Integer(key).value_or(0);
}

}  // namespace heddle
