#include "runtime/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

absl::StatusOr<std::string> Apply(const Normalizer::Nfc&, std::string text) {
  if (std::all_of(text.begin(), text.end(), absl::ascii_isascii)) return text;
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), text.size(), &composed,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, &std::free);
  if (size < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot compose ", text.size(), " bytes: ", utf8proc_errmsg(size)));
  }
  return std::string(reinterpret_cast<const char*>(composed), size);
}

absl::StatusOr<std::string> Apply(const Normalizer::Prepend& prepend, std::string text) {
  return text.empty() ? std::move(text) : absl::StrCat(prepend.text, text);
}

absl::StatusOr<std::string> Apply(const Normalizer::Replace& replace, std::string text) {
  std::vector<Pattern::Match> matches;
  RETURN_IF_ERROR(replace.pattern.FindAll(text, &matches));
  std::string replaced;
  size_t end = 0;
  for (const Pattern::Match& match : matches) {
    absl::StrAppend(&replaced, absl::string_view(text).substr(end, match.begin - end),
                    replace.replacement);
    end = match.end;
  }
  absl::StrAppend(&replaced, absl::string_view(text).substr(end));
  return replaced;
}

}  // namespace

absl::StatusOr<std::string> Normalizer::Normalize(absl::string_view text) const {
  std::string result(text);
  for (const Step& step : steps_) {
    ASSIGN_OR_RETURN(
        result,
        std::visit([&](const auto& typed) { return Apply(typed, std::move(result)); }, step));
  }
  return result;
}

}  // namespace heddle
