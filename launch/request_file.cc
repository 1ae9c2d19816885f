#include "launch/request_file.h"

#include <cstdint>
#include <fstream>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace heddle {
namespace {

using Json = nlohmann::json;

constexpr int kMaxNesting = 8;

absl::Status WrongType(const std::string& key, absl::string_view expected, const Json& value) {
  return absl::InvalidArgumentError(
      absl::StrCat("field \"", key, "\": expected ", expected, ", found ", value.type_name()));
}

// A JSON object without repeated keys or deep nesting.
absl::StatusOr<Json> ParseObject(absl::string_view text) {
  std::set<std::string> keys;
  std::string repeated;
  bool too_deep = false;
  const auto callback = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxNesting) {
      too_deep = true;
      return false;
    }
    if (event == Json::parse_event_t::key && depth == 1 &&
        !keys.insert(parsed.get<std::string>()).second && repeated.empty()) {
      repeated = parsed.get<std::string>();
    }
    return true;
  };
  const Json json = Json::parse(text.begin(), text.end(), callback, /*allow_exceptions=*/false);
  if (too_deep) return absl::InvalidArgumentError("nested too deeply");
  if (json.is_discarded()) return absl::InvalidArgumentError("not valid JSON");
  if (!json.is_object()) return absl::InvalidArgumentError("expected a JSON object");
  if (!repeated.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("field \"", repeated, "\" is given twice"));
  }
  return json;
}

absl::Status Read(const std::string& key, const Json& value, double& target) {
  if (!value.is_number()) return WrongType(key, "a number", value);
  target = value.get<double>();
  return absl::OkStatus();
}

absl::Status Read(const std::string& key, const Json& value, bool& target) {
  if (!value.is_boolean()) return WrongType(key, "true or false", value);
  target = value.get<bool>();
  return absl::OkStatus();
}

absl::Status Read(const std::string& key, const Json& value, std::string& target) {
  if (!value.is_string()) return WrongType(key, "a string", value);
  target = value.get<std::string>();
  return absl::OkStatus();
}

absl::Status Read(const std::string& key, const Json& value, int64_t& target) {
  if (!value.is_number_integer()) return WrongType(key, "a whole number", value);
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return absl::InvalidArgumentError(
        absl::StrCat("field \"", key, "\": ", value.dump(), " is too large"));
  }
  target = value.get<int64_t>();
  return absl::OkStatus();
}

absl::Status Read(const std::string& key, const Json& value, int32_t& target) {
  int64_t wide = 0;
  RETURN_IF_ERROR(Read(key, value, wide));
  if (wide < std::numeric_limits<int32_t>::min() || wide > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("field \"", key, "\": ", wide, " is not a token id"));
  }
  target = static_cast<int32_t>(wide);
  return absl::OkStatus();
}

absl::Status Read(const std::string& key, const Json& value, uint64_t& target) {
  if (!value.is_number_unsigned()) return WrongType(key, "a whole number of at least 0", value);
  target = value.get<uint64_t>();
  return absl::OkStatus();
}

template <typename T>
absl::Status Read(const std::string& key, const Json& value, std::vector<T>& target) {
  if (!value.is_array()) return WrongType(key, "an array", value);
  target.clear();
  target.reserve(value.size());
  for (const Json& element : value) RETURN_IF_ERROR(Read(key, element, target.emplace_back()));
  return absl::OkStatus();
}

// null means "not set".
template <typename T>
absl::Status Read(const std::string& key, const Json& value, std::optional<T>& target) {
  if (value.is_null()) {
    target.reset();
    return absl::OkStatus();
  }
  return Read(key, value, target.emplace());
}

absl::Status ReadStop(const Json& value, std::vector<std::string>& target) {
  if (!value.is_string()) return Read("stop", value, target);
  target = {value.get<std::string>()};
  return absl::OkStatus();
}

// InvalidArgument for a key that is no sampling parameter.
absl::Status ReadSamplingField(const std::string& key, const Json& value, SamplingParams& params) {
  if (key == "max_tokens") return Read(key, value, params.max_tokens);
  if (key == "min_tokens") return Read(key, value, params.min_tokens);
  if (key == "temperature") return Read(key, value, params.temperature);
  if (key == "top_k") return Read(key, value, params.top_k);
  if (key == "top_p") return Read(key, value, params.top_p);
  if (key == "min_p") return Read(key, value, params.min_p);
  if (key == "repetition_penalty") return Read(key, value, params.repetition_penalty);
  if (key == "presence_penalty") return Read(key, value, params.presence_penalty);
  if (key == "frequency_penalty") return Read(key, value, params.frequency_penalty);
  if (key == "seed") return Read(key, value, params.seed);
  if (key == "n") return Read(key, value, params.n);
  if (key == "logprobs") return Read(key, value, params.logprobs);
  if (key == "ignore_eos") return Read(key, value, params.ignore_eos);
  if (key == "stop") return ReadStop(value, params.stop);
  if (key == "stop_token_ids") return Read(key, value, params.stop_token_ids);
  if (key == "skip_special_tokens") return Read(key, value, params.skip_special_tokens);
  return absl::InvalidArgumentError(absl::StrCat("unknown field \"", key, "\""));
}

// Reads "id" and the prompt under either of its names; other keys go to `read_other`.
template <typename ReadOther>
absl::Status ReadLine(absl::string_view text, const char* text_key, const char* ids_key,
                      Request& request, const ReadOther& read_other) {
  ASSIGN_OR_RETURN(const Json json, ParseObject(text));
  if (json.contains("id")) {
    const Json& id = json["id"];
    if (!id.is_string() && !id.is_number_integer()) return WrongType("id", "a string", id);
    request.id = id.is_string() ? id.get<std::string>() : id.dump();
  }
  const bool has_text = json.contains(text_key);
  if (has_text == json.contains(ids_key)) {
    return absl::InvalidArgumentError(absl::StrCat("expected one of \"", text_key, "\" and \"",
                                                   ids_key, "\", found ",
                                                   has_text ? "both" : "neither"));
  }
  for (const auto& [key, value] : json.items()) {
    if (key == "id") continue;
    if (key == text_key) {
      RETURN_IF_ERROR(Read(key, value, request.prompt.emplace<std::string>()));
    } else if (key == ids_key) {
      RETURN_IF_ERROR(Read(key, value, request.prompt.emplace<std::vector<int32_t>>()));
    } else {
      RETURN_IF_ERROR(read_other(key, value));
    }
  }
  return absl::OkStatus();
}

RequestLine Finish(const absl::Status& status, Request request) {
  RequestLine line{request.id, std::move(request)};
  if (!status.ok()) line.request = status;
  return line;
}

template <typename Parse>
std::vector<RequestLine> ParseJsonLines(const std::string& path,
                                        const std::vector<std::string>& lines, const Parse& parse) {
  std::vector<RequestLine> parsed;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (absl::StripAsciiWhitespace(lines[i]).empty()) continue;
    RequestLine line = parse(lines[i], std::to_string(parsed.size()));
    if (!line.request.ok()) {
      line.request = Annotate(line.request.status(), absl::StrCat(path, ":", i + 1));
    }
    parsed.push_back(std::move(line));
  }
  return parsed;
}

}  // namespace

RequestLine ParseRequestLine(absl::string_view json, const SamplingParams& defaults,
                             const std::string& fallback_id) {
  Request request;
  request.id = fallback_id;
  request.params = defaults;
  const absl::Status status = ReadLine(json, "prompt", "prompt_token_ids", request,
                                       [&](const std::string& key, const Json& value) {
                                         return ReadSamplingField(key, value, request.params);
                                       });
  return Finish(status, std::move(request));
}

RequestLine ParseScoreLine(absl::string_view json, const std::string& fallback_id) {
  Request request;
  request.id = fallback_id;
  request.params.max_tokens = 0;
  request.params.prompt_logprobs = true;
  const absl::Status status =
      ReadLine(json, "text", "token_ids", request, [](const std::string& key, const Json&) {
        return absl::InvalidArgumentError(absl::StrCat("unknown field \"", key, "\""));
      });
  return Finish(status, std::move(request));
}

absl::StatusOr<std::vector<std::string>> ReadTextLines(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read \"", path, "\""));
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(std::move(line));
  if (file.bad()) return absl::DataLossError(absl::StrCat("cannot read all of \"", path, "\""));
  return lines;
}

std::vector<RequestLine> ParseRequestLines(const std::string& path,
                                           const std::vector<std::string>& lines,
                                           const SamplingParams& defaults) {
  if (absl::EndsWith(path, ".jsonl")) {
    return ParseJsonLines(path, lines, [&](absl::string_view json, const std::string& id) {
      return ParseRequestLine(json, defaults, id);
    });
  }
  std::vector<RequestLine> parsed;
  for (const std::string& line : lines) {
    const std::string id = std::to_string(parsed.size());
    const absl::string_view text = absl::StripSuffix(line, "\r");
    parsed.push_back({id, Request{id, std::string(text), defaults}});
  }
  return parsed;
}

std::vector<RequestLine> ParseScoreLines(const std::string& path,
                                         const std::vector<std::string>& lines) {
  return ParseJsonLines(path, lines, ParseScoreLine);
}

}  // namespace heddle
