// Typed fields of a JSON object, with every problem kept.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace heddle {

// Reads fields of one object. A field of the wrong type is noted in `problems` and reads as
// absent; a field that is null is absent. Borrows the object and the list. Included by parsers'
// .cc files only, for the weight of its include.
class ConfigReader {
 public:
  // `path` is put before keys in messages, e.g. "rope_scaling.".
  ConfigReader(const nlohmann::json& object, std::string path, std::vector<std::string>& problems)
      : object_(object), path_(std::move(path)), problems_(problems) {}

  // Null if absent or null.
  const nlohmann::json* Find(absl::string_view key) const;
  bool HasKey(absl::string_view key) const;

  std::optional<int64_t> Integer(absl::string_view key) const;
  std::optional<double> Number(absl::string_view key) const;
  std::optional<bool> Bool(absl::string_view key) const;
  std::optional<std::string> String(absl::string_view key) const;
  // An object; null if absent or something else.
  const nlohmann::json* Object(absl::string_view key) const;
  // A whole number or a list of them.
  std::vector<int64_t> Integers(absl::string_view key) const;
  std::vector<std::string> Strings(absl::string_view key) const;

  // 0 and a problem if absent.
  int64_t RequiredInteger(absl::string_view key) const;

  // Once, however often the field is read.
  void AddProblem(absl::string_view key, absl::string_view text) const;

 private:
  void AddTypeProblem(absl::string_view key, absl::string_view expected,
                      const nlohmann::json& found) const;

  const nlohmann::json& object_;
  std::string path_;
  std::vector<std::string>& problems_;
};

}  // namespace heddle
