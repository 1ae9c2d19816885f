#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/pattern.h"
#include "runtime/text/unicode_additions.h"

namespace heddle {
namespace {

// Walks the expression once, copying what both engines read alike.
class Translator {
 public:
  explicit Translator(absl::string_view expression) : all_(expression), rest_(expression) {}

  absl::StatusOr<std::string> Run() {
    while (!rest_.empty()) {
      switch (rest_[0]) {
        case '\\':
          RETURN_IF_ERROR(Escape(/*in_class=*/false));
          break;
        case '[':
          RETURN_IF_ERROR(Class());
          break;
        case '(':
          RETURN_IF_ERROR(Group());
          break;
        case '{':
          RETURN_IF_ERROR(Interval());
          break;
        default:
          Copy(1);
      }
    }
    return std::move(result_);
  }

 private:
  void Copy(size_t size) {
    absl::StrAppend(&result_, rest_.substr(0, size));
    rest_.remove_prefix(size);
  }

  absl::Status Refuse(absl::string_view what) const {
    return absl::UnimplementedError(absl::StrCat("regular expression \"", all_, "\": ", what,
                                                 " at byte ", all_.size() - rest_.size(),
                                                 " is not supported"));
  }

  absl::Status Escape(bool in_class) {
    if (rest_.size() < 2) return Refuse("a backslash at the end");
    const char c = rest_[1];
    if (c == 'p' || c == 'P') return Property(in_class);
    if (c == 'u' || c == 'x') return CodePointEscape();
    if (absl::ascii_ispunct(c) || absl::StrContains("rntf", absl::string_view(&c, 1))) {
      Copy(2);
      return absl::OkStatus();
    }
    if (c == 's' || c == 'S') {
      // PCRE2's own would count U+180E, which left the spaces with Unicode 6.3.
      absl::StrAppend(&result_, c == 's' ? "\\p{White_Space}" : "\\P{White_Space}");
    } else if (c == 'd' || c == 'D') {
      AppendProperty("Nd", c == 'D', in_class);
    } else {
      return Refuse("this escape");
    }
    rest_.remove_prefix(2);
    return absl::OkStatus();
  }

  // \p{L}, \p{Lu}, \p{^L}, \p{Han}: general categories and scripts.
  absl::Status Property(bool in_class) {
    const size_t end = rest_.find('}');
    if (rest_.size() < 3 || rest_[2] != '{' || end == absl::string_view::npos) {
      return Refuse("a property without braces");
    }
    absl::string_view name = rest_.substr(3, end - 3);
    const bool negated = absl::ConsumePrefix(&name, "^") != (rest_[1] == 'P');
    const bool is_letters = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return absl::ascii_isalpha(c) || c == '_';
    });
    if (!is_letters) return Refuse("this property");
    AppendProperty(name, negated, in_class);
    rest_.remove_prefix(end + 1);
    return absl::OkStatus();
  }

  void AppendProperty(absl::string_view name, bool negated, bool in_class) {
    // Alone, the name of a script would mean its extensions too.
    const std::string property = absl::StrCat(name.size() > 2 ? "sc:" : "", name);
    if (negated && in_class) {
      // Inside a class nothing can be taken out, so the additions stay unknown.
      absl::StrAppend(&result_, "\\P{", property, "}");
      return;
    }
    const std::string members = absl::StrCat("\\p{", property, "}", UnicodeAdditions(name));
    absl::StrAppend(&result_, in_class ? "" : negated ? "[^" : "[", members, in_class ? "" : "]");
  }

  // \uHHHH and \xHH. Above 0x7F the latter would be a byte of UTF-8.
  absl::Status CodePointEscape() {
    const size_t num_digits = rest_[1] == 'u' ? 4 : 2;
    const absl::string_view digits = rest_.substr(2, num_digits);
    const bool is_hex = digits.size() == num_digits &&
                        std::all_of(digits.begin(), digits.end(), absl::ascii_isxdigit);
    if (!is_hex || (num_digits == 2 && digits[0] > '7')) return Refuse("this code point");
    absl::StrAppend(&result_, "\\x{", digits, "}");
    rest_.remove_prefix(2 + num_digits);
    return absl::OkStatus();
  }

  absl::Status Class() {
    Copy(1);
    if (absl::StartsWith(rest_, "^")) Copy(1);
    if (absl::StartsWith(rest_, "]")) return Refuse("a ] at the start of a class");
    while (!rest_.empty() && rest_[0] != ']') {
      if (rest_[0] == '[') return Refuse("a class inside a class");
      if (absl::StartsWith(rest_, "&&")) return Refuse("&& inside a class");
      if (rest_[0] == '\\') {
        RETURN_IF_ERROR(Escape(/*in_class=*/true));
      } else {
        Copy(1);
      }
    }
    if (rest_.empty()) return Refuse("a class without an end");
    Copy(1);
    return absl::OkStatus();
  }

  absl::Status Group() {
    for (const absl::string_view start : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (!absl::StartsWith(rest_, start)) continue;
      Copy(start.size());
      return absl::OkStatus();
    }
    if (absl::StartsWith(rest_, "(?") || absl::StartsWith(rest_, "(*")) {
      return Refuse("this kind of group");
    }
    Copy(1);
    return absl::OkStatus();
  }

  // {n}, {n,}, {n,m}. Oniguruma also knows {,m}, and repeats the interval where
  // PCRE2 reads {n}+ as possessive and {n}? as lazy.
  absl::Status Interval() {
    const size_t end = rest_.find('}');
    if (end == absl::string_view::npos) return Refuse("a { without an end");
    const absl::string_view counts = rest_.substr(1, end - 1);
    const bool is_counts = !counts.empty() && absl::ascii_isdigit(counts[0]) &&
                           counts.find_first_not_of("0123456789,") == absl::string_view::npos;
    if (!is_counts) return Refuse("this interval");
    const absl::string_view next = rest_.substr(end + 1, 1);
    if (!next.empty() && absl::StrContains("+?*{", next)) return Refuse("a repeated interval");
    Copy(end + 1);
    return absl::OkStatus();
  }

  const absl::string_view all_;
  absl::string_view rest_;
  std::string result_;
};

}  // namespace

absl::StatusOr<std::string> OnigurumaToPcre2(absl::string_view expression) {
  return Translator(expression).Run();
}

}  // namespace heddle
