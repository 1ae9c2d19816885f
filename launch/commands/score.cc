#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "launch/commands/collector.h"
#include "launch/commands/commands.h"
#include "launch/commands/ordered_lines.h"
#include "launch/commands/result_file.h"
#include "launch/json_text.h"
#include "launch/request_file.h"
#include "runtime/engine.h"

namespace heddle {
namespace {

std::string ScoreLine(const std::string& id, const CollectedSequence& sequence, bool with_logits) {
  std::string json = "{\"id\":";
  AppendJsonString(id, json);
  if (!sequence.error.ok()) {
    json += ",\"error\":";
    AppendJsonString(sequence.error.message(), json);
    return json + "}";
  }
  json += ",\"token_ids\":";
  AppendJsonIds(sequence.prompt_token_ids, json);
  json += ",\"token_logprobs\":[null";
  for (size_t i = 1; i < sequence.prompt_logprobs.size(); ++i) {
    json += ',';
    AppendJsonFloat(sequence.prompt_logprobs[i], json);
  }
  json += ']';
  if (with_logits) {
    const size_t vocab_size = sequence.prompt_logits.size() / sequence.prompt_token_ids.size();
    json += ",\"logits\":[";
    for (size_t i = 0; i < sequence.prompt_token_ids.size(); ++i) {
      if (i > 0) json += ',';
      AppendJsonFloats(std::span(sequence.prompt_logits).subspan(i * vocab_size, vocab_size), json);
    }
    json += ']';
  }
  return json + "}";
}

absl::StatusOr<int> Score(const CommandLine& line, std::vector<RequestLine> requests,
                          ResultFile& results, World& world) {
  OrderedLines lines(results);
  double sum_logprob = 0.0;
  int64_t num_scored = 0;
  bool any_error = false;
  Collector collector([&](size_t place, std::vector<CollectedSequence> sequences) {
    const CollectedSequence& sequence = sequences.front();
    any_error |= !sequence.error.ok();
    for (size_t i = 1; i < sequence.prompt_logprobs.size(); ++i) {
      sum_logprob += sequence.prompt_logprobs[i];
      ++num_scored;
    }
    lines.Put(place, ScoreLine(requests[place].id, sequence, line.score.logits));
  });
  ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                   Engine::Create(line.engine, world, [&collector](RequestOutput output) {
                     collector.Take(std::move(output));
                   }));
  bool any_refused = false;
  for (size_t place = 0; place < requests.size(); ++place) {
    if (requests[place].request.ok()) {
      requests[place].request->params.prompt_logits = line.score.logits;
    }
    const absl::Status status = collector.Submit(*engine, place, requests[place].request);
    if (status.ok()) continue;
    any_refused = true;
    CollectedSequence refused;
    refused.error = status;
    lines.Put(place, ScoreLine(requests[place].id, refused, false));
  }
  const absl::Status drained = engine->Drain();
  RETURN_IF_ERROR(results.Close());
  RETURN_IF_ERROR(drained);
  if (num_scored > 0) {
    std::fprintf(stderr, "perplexity %.6g over %" PRId64 " tokens\n",
                 std::exp(-sum_logprob / static_cast<double>(num_scored)), num_scored);
  }
  if (any_refused) return kExitRefused;
  return any_error ? kExitFailure : kExitOk;
}

}  // namespace

absl::StatusOr<EngineCommand> PrepareScore(const CommandLine& line) {
  ASSIGN_OR_RETURN(const std::vector<std::string> file_lines, ReadTextLines(line.score.input));
  ASSIGN_OR_RETURN(std::shared_ptr<ResultFile> results, ResultFile::Open(line.score.output));
  return [line, requests = ParseScoreLines(line.score.input, file_lines), results](World& world) {
    return Score(line, requests, *results, world);
  };
}

}  // namespace heddle
