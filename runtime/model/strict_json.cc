#include "runtime/model/strict_json.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace heddle {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;

// Builds the document from the parser's events. A handler that returns false ends the parse.
class DocumentBuilder : public nlohmann::json_sax<json> {
 public:
  DocumentBuilder() = default;  // NOLINT(bugprone-exception-escape): null allocates nothing
  DocumentBuilder(const DocumentBuilder&) = delete;  // it holds pointers into its document
  DocumentBuilder& operator=(const DocumentBuilder&) = delete;

  const std::string& error() const { return error_; }
  json TakeDocument() { return std::move(document_); }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t&) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return Fail("binary value"); }
  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    if (open_.back()->contains(name)) return Fail(absl::StrCat("the key \"", name, "\" twice"));
    key_ = std::move(name);
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string text = error.what();  // "[json.exception.parse_error.101] parse error at …"
    const size_t bracket = text.find("] ");
    return Fail(bracket == std::string::npos ? text : text.substr(bracket + 2));
  }

 private:
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }

  json& Insert(json value) {
    if (open_.empty()) return document_ = std::move(value);
    json& parent = *open_.back();
    if (parent.is_object()) return parent[key_] = std::move(value);
    parent.push_back(std::move(value));
    return parent.back();
  }

  bool Add(json value) {
    Insert(std::move(value));
    return true;
  }

  bool Open(json container) {
    if (open_.size() == kMaxDepth) return Fail(absl::StrCat("nesting deeper than ", kMaxDepth));
    open_.push_back(&Insert(std::move(container)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  json document_;
  // From the root inwards. An element is stable while it is open: its parent grows only after it
  // has been closed.
  std::vector<json*> open_;
  std::string key_;
  std::string error_;
};

}  // namespace

absl::StatusOr<json> ParseStrictJson(absl::string_view text, absl::string_view file_name) {
  DocumentBuilder builder;
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ": not a valid JSON configuration: ", builder.error()));
  }
  return builder.TakeDocument();
}

}  // namespace heddle
