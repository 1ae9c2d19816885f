// An untrusted JSON document that names the place of every complaint.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// A value inside a document and its path, such as
// "tokenizer.json: pre_tokenizer.pretokenizers[1].pattern". The parser that read
// the document must outlive it. The accessors fail if the value is of another type.
class JsonValue {
 public:
  using Member = std::pair<absl::string_view, JsonValue>;

  // Reads `document` with `parser`; `name` starts every path.
  static absl::StatusOr<JsonValue> Parse(absl::string_view document, absl::string_view name,
                                         simdjson::dom::parser* parser);

  absl::StatusOr<JsonValue> Get(absl::string_view key) const;
  // The member unless it is missing or null. Of anything but an object: nothing.
  std::optional<JsonValue> Find(absl::string_view key) const;

  absl::StatusOr<absl::string_view> String() const;
  absl::StatusOr<int32_t> Int32() const;
  absl::StatusOr<bool> Bool() const;
  absl::StatusOr<bool> BoolOr(absl::string_view key, bool missing) const;
  absl::StatusOr<std::vector<JsonValue>> Elements() const;
  absl::StatusOr<std::vector<Member>> Members() const;
  bool IsString() const { return element_.is_string(); }

  // An error of `code` about this value.
  absl::Status Error(absl::StatusCode code, absl::string_view message) const;
  absl::Status Invalid(absl::string_view message) const {
    return Error(absl::StatusCode::kInvalidArgument, message);
  }
  absl::Status Unsupported(absl::string_view message) const {
    return Error(absl::StatusCode::kUnimplemented, message);
  }

 private:
  JsonValue(simdjson::dom::element element, std::string path)
      : element_(element), path_(std::move(path)) {}

  simdjson::dom::element element_;
  std::string path_;
};

}  // namespace heddle
