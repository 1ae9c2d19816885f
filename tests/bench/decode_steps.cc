// Decodes on command, so that peers/compare.py can let engines take turns.
//
// Usage: decode_steps MODEL BATCH CONTEXT THREADS RANKS KV_CACHE_DTYPE
// Fills the cache with BATCH sequences of CONTEXT random tokens (a multiple of the page size), then
// prints a line {"ready": ...}. Each line "N" of stdin is answered by a list of the seconds that
// each of N steps took; a step decodes one token of every sequence, and sampling is part of it.
// A MODEL that is a directory with nothing but a config.json has random weights. Ranks are threads
// of this process.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "tests/support/engine_world.h"

namespace heddle {
namespace {

constexpr int64_t kPageSize = 64;
// The steps at both ends, in which sequences are admitted and end, are not counted.
constexpr int64_t kUncountedSteps = 4;
constexpr int64_t kMostSteps = 56;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The sequences, and when the last of them got its tokens.
struct Decoder {
  std::vector<Request> requests;
  std::vector<double> token_seconds;  // written on the engine's thread, read after Drain

  absl::Status Run(Engine& engine, int64_t num_tokens) {
    token_seconds.clear();
    for (Request& request : requests) {
      request.params.max_tokens = num_tokens;
      RETURN_IF_ERROR(engine.Submit(request));
    }
    return engine.Drain();
  }
};

std::vector<Request> RandomRequests(int64_t batch, int64_t context, int64_t vocab_size) {
  std::mt19937_64 random(1);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocab_size) - 1);
  std::vector<Request> requests(batch);
  for (int64_t i = 0; i < batch; ++i) {
    requests[i].id = absl::StrCat(i);
    std::vector<int32_t>& prompt = requests[i].prompt.emplace<std::vector<int32_t>>();
    // All pages of the context are found in the cache again, so that the first step, too, has one
    // row a sequence.
    for (int64_t place = 0; place <= context; ++place) prompt.push_back(token(random));
    // Of random tokens, as the peers: those of greedy decoding soon choose the same experts.
    requests[i].params.temperature = 1.0;
    requests[i].params.seed = i;
    requests[i].params.ignore_eos = true;
  }
  return requests;
}

absl::Status Serve(Engine& engine, Decoder& decoder, int64_t batch, int64_t context) {
  decoder.requests = RandomRequests(batch, context, engine.vocab_size());
  RETURN_IF_ERROR(decoder.Run(engine, 1));
  const EngineStats stats = engine.stats();
  std::cout << "{\"ready\": true, \"kv_bytes_per_token\": " << stats.kv_bytes_per_token
            << ", \"weight_bytes\": " << stats.weight_bytes << "}" << std::endl;
  int64_t num_steps = 0;
  while (std::cin >> num_steps) {
    num_steps = std::min(num_steps, kMostSteps);
    engine.ResetStats();
    RETURN_IF_ERROR(decoder.Run(engine, num_steps + 2 * kUncountedSteps));
    if (engine.stats().num_cached_tokens != batch * context) {
      return absl::InternalError("the cache did not keep the contexts");
    }
    std::vector<double> seconds;
    for (int64_t i = 0; i < num_steps; ++i) {
      const double* time = &decoder.token_seconds[kUncountedSteps + i];
      seconds.push_back(time[0] - time[-1]);
    }
    std::cout << "[" << absl::StrJoin(seconds, ", ") << "]" << std::endl;
  }
  return absl::OkStatus();
}

absl::Status Main(char** argv) {
  SetMinLogSeverity(LogSeverity::kWarning);
  const int64_t batch = std::atoll(argv[2]);
  const int64_t context = std::atoll(argv[3]);
  if (batch < 1 || context < kPageSize || context % kPageSize != 0) {
    return absl::InvalidArgumentError("BATCH must be positive, CONTEXT a multiple of 64");
  }
  EngineConfig config;
  config.model = argv[1];
  if (!std::filesystem::exists(std::filesystem::path(config.model) / "model.safetensors")) {
    config.load_format = LoadFormat::kDummy;
  }
  config.num_threads = std::atoi(argv[4]);
  ASSIGN_OR_RETURN(config.kv_cache_dtype, ParseDType(argv[6]));
  config.block_size = kPageSize;
  config.max_num_seqs = batch;
  config.max_model_len = context + kPageSize;
  // Room for the tails beside the contexts, so that none of these is evicted.
  config.num_kv_pages = batch * (context / kPageSize + 2);
  Decoder decoder;
  const std::string last = absl::StrCat(batch - 1);
  return WithEngine(
      config, std::atoi(argv[5]),
      [&](const RequestOutput& output) {
        if (output.id == last) decoder.token_seconds.push_back(Now());
      },
      [&](Engine& engine) { return Serve(engine, decoder, batch, context); });
}

}  // namespace
}  // namespace heddle

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: decode_steps MODEL BATCH CONTEXT THREADS RANKS KV_CACHE_DTYPE\n");
    return 2;
  }
  const absl::Status status = heddle::Main(argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
