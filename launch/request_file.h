// Requests as users write them: a line of text, or a line of JSON.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/request.h"

namespace heddle {

// One line of a prompt file; a bad one does not keep the others from running.
struct RequestLine {
  std::string id;  // as far as it could be read, for the error line
  absl::StatusOr<Request> request;
};

// A JSON object {"id", "prompt" | "prompt_token_ids", any field of SamplingParams}; fields not
// given come from `defaults`. InvalidArgument for what is not JSON, unknown, of the wrong type or
// given twice. `fallback_id` is used where there is no "id".
RequestLine ParseRequestLine(absl::string_view json, const SamplingParams& defaults,
                             const std::string& fallback_id);

// The lines of a text file. NotFound if it cannot be read.
absl::StatusOr<std::vector<std::string>> ReadTextLines(const std::string& path);

// The lines of a .jsonl file, or of any other as a prompt each. Ids default to the request's index;
// errors name path and line. Empty lines of a .jsonl are skipped, those of a text are empty
// prompts.
std::vector<RequestLine> ParseRequestLines(const std::string& path,
                                           const std::vector<std::string>& lines,
                                           const SamplingParams& defaults);

// A line of heddle score: {"id", "token_ids" | "text"}.
RequestLine ParseScoreLine(absl::string_view json, const std::string& fallback_id);
std::vector<RequestLine> ParseScoreLines(const std::string& path,
                                         const std::vector<std::string>& lines);

}  // namespace heddle
