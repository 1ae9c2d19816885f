// Early return on errors.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace heddle {

// The same error with `context` in front of its message: "context: message".
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(context, ": ", status.message()));
}

}  // namespace heddle

#define HEDDLE_CONCAT_INNER(a, b) a##b
#define HEDDLE_CONCAT(a, b) HEDDLE_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expression)                \
  do {                                             \
    ::absl::Status heddle_status = (expression);   \
    if (!heddle_status.ok()) return heddle_status; \
  } while (false)

#define ASSIGN_OR_RETURN(declaration, expression) \
  HEDDLE_ASSIGN_OR_RETURN(HEDDLE_CONCAT(heddle_or_, __LINE__), declaration, expression)
#define HEDDLE_ASSIGN_OR_RETURN(temporary, declaration, expression) \
  auto temporary = (expression);                                    \
  if (!temporary.ok()) return std::move(temporary).status();        \
  declaration = *std::move(temporary)
