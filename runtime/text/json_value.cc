#include "runtime/text/json_value.h"

#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

}  // namespace

absl::StatusOr<JsonValue> JsonValue::Parse(absl::string_view document, absl::string_view name,
                                           simdjson::dom::parser* parser) {
  simdjson::dom::element root;
  const simdjson::error_code error =
      parser->parse(simdjson::padded_string(document.data(), document.size())).get(root);
  if (error != simdjson::SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": not valid JSON: ", simdjson::error_message(error)));
  }
  return JsonValue(root, absl::StrCat(name, ": "));
}

absl::Status JsonValue::Error(absl::StatusCode code, absl::string_view message) const {
  const bool is_root = absl::EndsWith(path_, ": ");
  return absl::Status(code, absl::StrCat(path_, is_root ? "" : ": ", message));
}

absl::StatusOr<JsonValue> JsonValue::Get(absl::string_view key) const {
  if (std::optional<JsonValue> member = Find(key)) return *std::move(member);
  if (!element_.is_object()) return Invalid("must be an object");
  return Invalid(absl::StrCat("\"", key, "\" is missing"));
}

std::optional<JsonValue> JsonValue::Find(absl::string_view key) const {
  simdjson::dom::element member;
  if (element_.at_key({key.data(), key.size()}).get(member) != simdjson::SUCCESS ||
      member.is_null()) {
    return std::nullopt;
  }
  const bool is_root = absl::EndsWith(path_, ": ");
  return JsonValue(member, absl::StrCat(path_, is_root ? "" : ".", key));
}

absl::StatusOr<absl::string_view> JsonValue::String() const {
  std::string_view text;
  if (element_.get(text) != simdjson::SUCCESS) return Invalid("must be a string");
  return View(text);
}

absl::StatusOr<int32_t> JsonValue::Int32() const {
  int64_t number = 0;
  if (element_.get(number) != simdjson::SUCCESS || number < std::numeric_limits<int32_t>::min() ||
      number > std::numeric_limits<int32_t>::max()) {
    return Invalid("must be an integer of 32 bits");
  }
  return static_cast<int32_t>(number);
}

absl::StatusOr<bool> JsonValue::Bool() const {
  bool value = false;
  if (element_.get(value) != simdjson::SUCCESS) return Invalid("must be true or false");
  return value;
}

absl::StatusOr<bool> JsonValue::BoolOr(absl::string_view key, bool missing) const {
  const std::optional<JsonValue> member = Find(key);
  return member.has_value() ? member->Bool() : missing;
}

absl::StatusOr<std::vector<JsonValue>> JsonValue::Elements() const {
  simdjson::dom::array array;
  if (element_.get(array) != simdjson::SUCCESS) return Invalid("must be an array");
  std::vector<JsonValue> elements;
  for (const simdjson::dom::element element : array) {
    elements.push_back(JsonValue(element, absl::StrCat(path_, "[", elements.size(), "]")));
  }
  return elements;
}

absl::StatusOr<std::vector<JsonValue::Member>> JsonValue::Members() const {
  simdjson::dom::object object;
  if (element_.get(object) != simdjson::SUCCESS) return Invalid("must be an object");
  std::vector<Member> members;
  for (const simdjson::dom::key_value_pair member : object) {
    const absl::string_view key = View(member.key);
    members.emplace_back(key, JsonValue(member.value, absl::StrCat(path_, "[\"", key, "\"]")));
  }
  return members;
}

}  // namespace heddle
