#include "runtime/text/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

constexpr size_t kMaxExpressionBytes = 1 << 16;
// Split rules in use need a few dozen steps a match, and no heap.
constexpr absl::string_view kLimits = "(*LIMIT_MATCH=1000000)(*LIMIT_HEAP=65536)";

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
template <typename T, void (*Free)(T*)>
using Owned = std::unique_ptr<T, Deleter<T, Free>>;
using CompileContext = Owned<pcre2_compile_context, pcre2_compile_context_free>;
using MatchData = Owned<pcre2_match_data, pcre2_match_data_free>;

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256];
  const int size = pcre2_get_error_message(code, buffer, sizeof(buffer));
  if (size < 0) return absl::StrCat("PCRE2 error ", code);
  return std::string(reinterpret_cast<const char*>(buffer), size);
}

PCRE2_SPTR Chars(absl::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

}  // namespace

absl::StatusOr<Pattern> Pattern::Regex(absl::string_view expression) {
  ASSIGN_OR_RETURN(const std::string translated, OnigurumaToPcre2(expression));
  // In Ruby's syntax ^ and $ always match at lines.
  return Compile(kLimits, translated, PCRE2_UCP | PCRE2_MULTILINE);
}

absl::StatusOr<Pattern> Pattern::Literal(absl::string_view text) {
  return Compile("", text, PCRE2_LITERAL);
}

absl::StatusOr<Pattern> Pattern::Compile(absl::string_view limits, absl::string_view expression,
                                         uint32_t options) {
  if (expression.empty()) return absl::InvalidArgumentError("the pattern is empty");
  const CompileContext context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_max_pattern_length(context.get(), kMaxExpressionBytes);
  int error = 0;
  size_t error_offset = 0;
  const std::string limited = absl::StrCat(limits, expression);
  pcre2_code* code = pcre2_compile(Chars(limited), limited.size(), options | PCRE2_UTF, &error,
                                   &error_offset, context.get());
  if (code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("regular expression \"", expression, "\": ", ErrorText(error)));
  }
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // Where there is no JIT, it is interpreted.
  Pattern pattern;
  pattern.code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
  return pattern;
}

absl::Status Pattern::FindAll(absl::string_view text, std::vector<Match>* matches) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const MatchData data(pcre2_match_data_create(1, nullptr));
  const auto match_from = [&](size_t start, uint32_t options) {
    return pcre2_match(code, Chars(text), text.size(), start, options | PCRE2_NO_UTF_CHECK,
                       data.get(), nullptr);
  };

  matches->clear();
  const size_t* const found = pcre2_get_ovector_pointer(data.get());
  for (size_t start = 0; start <= text.size();) {
    int count = match_from(start, 0);
    // The interpreter keeps on the heap what does not fit the JIT's small stack.
    if (count == PCRE2_ERROR_JIT_STACKLIMIT) count = match_from(start, PCRE2_NO_JIT);
    if (count == PCRE2_ERROR_NOMATCH) break;
    if (count < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a split rule gave up on the text: ", ErrorText(count)));
    }
    const Match match = {found[0], found[1]};
    if (match.begin == match.end && !matches->empty() && matches->back().end == match.end) {
      if (match.end == text.size()) break;
      start = match.end + FirstUtf8Unit(text.substr(match.end)).size;
      continue;
    }
    matches->push_back(match);
    start = match.end;
  }
  return absl::OkStatus();
}

}  // namespace heddle
