#include "runtime/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

constexpr auto kNfc = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

// The code points of `text`, each taken apart.
std::vector<utf8proc_int32_t> Decompose(absl::string_view text) {
  std::vector<utf8proc_int32_t> code_points;
  code_points.reserve(text.size());
  while (!text.empty()) {
    const absl::string_view unit = text.substr(0, FirstUtf8Unit(text).size);
    text.remove_prefix(unit.size());
    utf8proc_int32_t parts[4];  // No canonical decomposition is longer.
    int boundary_class = 0;
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(CodePoint(unit)), parts, 4,
                                UTF8PROC_DECOMPOSE, &boundary_class);
    CHECK(count > 0 && count <= 4);
    code_points.insert(code_points.end(), parts, parts + count);
  }
  return code_points;
}

// Sorts each run of combining marks by class. The library's own way takes time
// quadratic in the length of a run.
void OrderMarks(std::vector<utf8proc_int32_t>* code_points) {
  const auto mark_class = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  const auto is_mark = [&](utf8proc_int32_t c) { return mark_class(c) != 0; };
  for (auto begin = code_points->begin(); begin != code_points->end();) {
    begin = std::find_if(begin, code_points->end(), is_mark);
    const auto end = std::find_if_not(begin, code_points->end(), is_mark);
    std::stable_sort(begin, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return mark_class(a) < mark_class(b);
    });
    begin = end;
  }
}

absl::StatusOr<std::string> Apply(const Normalizer::Nfc&, std::string text, size_t /*max_bytes*/) {
  if (std::all_of(text.begin(), text.end(), absl::ascii_isascii)) return text;
  std::vector<utf8proc_int32_t> code_points = Decompose(text);
  OrderMarks(&code_points);
  const utf8proc_ssize_t size =
      utf8proc_normalize_utf32(code_points.data(), code_points.size(), kNfc);
  CHECK_GE(size, 0);
  std::string composed;
  for (utf8proc_ssize_t i = 0; i < size; ++i) {
    utf8proc_uint8_t unit[4];
    const utf8proc_ssize_t unit_size = utf8proc_encode_char(code_points[i], unit);
    composed.append(reinterpret_cast<const char*>(unit), unit_size);
  }
  return composed;
}

absl::StatusOr<std::string> Apply(const Normalizer::Prepend& prepend, std::string text,
                                  size_t /*max_bytes*/) {
  return text.empty() ? std::move(text) : absl::StrCat(prepend.text, text);
}

absl::StatusOr<std::string> Apply(const Normalizer::Replace& replace, const std::string& text,
                                  size_t max_bytes) {
  std::vector<Pattern::Match> matches;
  RETURN_IF_ERROR(replace.pattern.FindAll(text, &matches));
  std::string replaced;
  size_t end = 0;
  for (const Pattern::Match& match : matches) {
    absl::StrAppend(&replaced, absl::string_view(text).substr(end, match.begin - end),
                    replace.replacement);
    end = match.end;
    if (replaced.size() > max_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the normaliser would make more than ", max_bytes, " bytes of a text"));
    }
  }
  absl::StrAppend(&replaced, absl::string_view(text).substr(end));
  return replaced;
}

}  // namespace

absl::StatusOr<std::string> Normalizer::Normalize(absl::string_view text) const {
  // Real normalisers grow a text three-fold. Replacements of replacements could fill
  // the memory.
  const size_t max_bytes = 16 * text.size() + 4096;
  std::string result(text);
  for (const Step& step : steps_) {
    ASSIGN_OR_RETURN(
        result,
        std::visit([&](const auto& typed) { return Apply(typed, std::move(result), max_bytes); },
                   step));
  }
  return result;
}

}  // namespace heddle
