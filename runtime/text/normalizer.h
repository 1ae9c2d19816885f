// What is done to the text before it is split, as tokenizer.json's "normalizer" says.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/pattern.h"

namespace heddle {

// A sequence of steps. Immutable and thread-safe.
class Normalizer {
 public:
  struct Nfc {};  // Canonical composition.
  struct Prepend {
    std::string text;  // Goes in front of any text but an empty one.
  };
  struct Replace {
    Pattern pattern;
    std::string replacement;
  };
  using Step = std::variant<Nfc, Prepend, Replace>;

  void Add(Step step) { steps_.push_back(std::move(step)); }

  // `text` is well-formed UTF-8, and so is the result. Fails if the steps blow the
  // text up beyond reason.
  absl::StatusOr<std::string> Normalize(absl::string_view text) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace heddle
