// Regular expressions of tokenizer files: Oniguruma's syntax, run by PCRE2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// `expression` as PCRE2 must read it to match what Oniguruma (Ruby's syntax,
// UTF-8) does. Refuses whatever the two may read differently and the split rules
// of tokenizers do not use, such as \w, \h, \b, nested classes and inline options.
absl::StatusOr<std::string> OnigurumaToPcre2(absl::string_view expression);

// A compiled expression. Immutable; any number of threads may match at a time.
class Pattern {
 public:
  struct Match {
    size_t begin;
    size_t end;
  };

  static absl::StatusOr<Pattern> Regex(absl::string_view expression);
  static absl::StatusOr<Pattern> Literal(absl::string_view text);

  // All matches in well-formed UTF-8, from left to right, none overlapping; an
  // empty match never follows another match directly. Fails if the expression
  // backtracks beyond reason.
  absl::Status FindAll(absl::string_view text, std::vector<Match>* matches) const;

 private:
  static absl::StatusOr<Pattern> Compile(absl::string_view limits, absl::string_view expression,
                                         uint32_t options);

  std::shared_ptr<const void> code_;  // A pcre2_code; its header stays out of here.
};

}  // namespace heddle
