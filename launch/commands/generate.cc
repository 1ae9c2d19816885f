#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "launch/commands/collector.h"
#include "launch/commands/commands.h"
#include "launch/commands/ordered_lines.h"
#include "launch/commands/progress.h"
#include "launch/commands/result_file.h"
#include "launch/json_text.h"
#include "launch/request_file.h"
#include "runtime/engine.h"

namespace heddle {
namespace {

// Flags beat the checkpoint's generation_config.json, which beats the program's defaults.
SamplingParams WithModelDefaults(const CommandLine& line, const GenerationDefaults& model) {
  SamplingParams params = line.sampling;
  const GenerateFlags& flags = line.generate;
  if (!flags.temperature_given && model.temperature.has_value()) {
    params.temperature = *model.temperature;
  }
  if (!flags.temperature_given && model.do_sample == false) params.temperature = 0.0;
  if (!flags.top_k_given && model.top_k.has_value()) params.top_k = *model.top_k;
  if (!flags.top_p_given && model.top_p.has_value()) params.top_p = *model.top_p;
  if (!flags.min_p_given && model.min_p.has_value()) params.min_p = *model.min_p;
  if (!flags.repetition_penalty_given && model.repetition_penalty.has_value()) {
    params.repetition_penalty = *model.repetition_penalty;
  }
  return params;
}

void AppendLogprob(const TokenLogprob& logprob, std::string& json) {
  absl::StrAppend(&json, "{\"token_id\":", logprob.token_id, ",\"logprob\":");
  AppendJsonFloat(logprob.logprob, json);
}

std::string ResultLine(const std::string& id, std::optional<size_t> index,
                       const CollectedSequence& sequence, bool with_logprobs) {
  std::string json = "{\"id\":";
  AppendJsonString(id, json);
  if (index.has_value()) absl::StrAppend(&json, ",\"index\":", *index);
  json += ",\"prompt_token_ids\":";
  AppendJsonIds(sequence.prompt_token_ids, json);
  json += ",\"token_ids\":";
  AppendJsonIds(sequence.token_ids, json);
  json += ",\"text\":";
  AppendJsonString(sequence.text, json);
  absl::StrAppend(&json, ",\"finish_reason\":\"", FinishReasonName(sequence.finish_reason), "\"");
  if (!sequence.error.ok()) {
    json += ",\"error\":";
    AppendJsonString(sequence.error.message(), json);
  }
  absl::StrAppend(&json, ",\"cached_tokens\":", sequence.cached_tokens);
  if (with_logprobs) {
    json += ",\"logprobs\":[";
    for (size_t i = 0; i < sequence.logprobs.size(); ++i) {
      if (i > 0) json += ',';
      AppendLogprob(sequence.logprobs[i].chosen, json);
      json += ",\"top\":[";
      for (size_t j = 0; j < sequence.logprobs[i].top.size(); ++j) {
        if (j > 0) json += ',';
        AppendLogprob(sequence.logprobs[i].top[j], json);
        json += '}';
      }
      json += "]}";
    }
    json += ']';
  }
  json += '}';
  return json;
}

std::string ErrorLine(const std::string& id, const absl::Status& error) {
  CollectedSequence sequence;
  sequence.finish_reason = FinishReason::kError;
  sequence.error = error;
  return ResultLine(id, std::nullopt, sequence, false);
}

absl::StatusOr<int> Generate(const CommandLine& line, const std::vector<std::string>& file_lines,
                             ResultFile& results, World& world) {
  // Requests are known by their place in the input: ids of a file need not be unique.
  OrderedLines lines(results);
  std::vector<RequestLine> requests;
  Progress progress("generate");
  bool any_error = false;
  Collector collector([&](size_t place, std::vector<CollectedSequence> sequences) {
    std::string text;
    for (size_t i = 0; i < sequences.size(); ++i) {
      any_error |= !sequences[i].error.ok();
      if (i > 0) text += '\n';
      text += ResultLine(requests[place].id,
                         sequences.size() > 1 ? std::optional<size_t>(i) : std::nullopt,
                         sequences[i], !sequences[i].logprobs.empty());
    }
    lines.Put(place, std::move(text));
    progress.Advance();
  });
  ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                   Engine::Create(line.engine, world, [&collector](RequestOutput output) {
                     collector.Take(std::move(output));
                   }));
  const SamplingParams defaults = WithModelDefaults(line, engine->generation_defaults());
  RETURN_IF_ERROR(ValidateSamplingParams(defaults, engine->vocab_size()));
  requests = ParseRequestLines(line.generate.prompt_file, file_lines, defaults);
  for (const std::string& prompt : line.generate.prompts) {
    const std::string id = std::to_string(requests.size());
    requests.push_back({id, Request{id, prompt, defaults}});
  }
  progress.Expect(static_cast<int64_t>(requests.size()));
  bool any_refused = false;
  for (size_t place = 0; place < requests.size(); ++place) {
    const absl::Status status = collector.Submit(*engine, place, requests[place].request);
    if (status.ok()) continue;
    any_refused = true;
    lines.Put(place, ErrorLine(requests[place].id, status));
    progress.Advance();
  }
  const absl::Status drained = engine->Drain();
  progress.Finish();
  RETURN_IF_ERROR(results.Close());
  RETURN_IF_ERROR(drained);
  if (any_refused) return kExitRefused;
  return any_error ? kExitFailure : kExitOk;
}

}  // namespace

absl::StatusOr<EngineCommand> PrepareGenerate(const CommandLine& line) {
  std::vector<std::string> file_lines;
  if (!line.generate.prompt_file.empty()) {
    ASSIGN_OR_RETURN(file_lines, ReadTextLines(line.generate.prompt_file));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<ResultFile> results, ResultFile::Open(line.generate.output));
  return [line, file_lines = std::move(file_lines), results](World& world) {
    return Generate(line, file_lines, *results, world);
  };
}

}  // namespace heddle
