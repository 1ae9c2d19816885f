#include "tests/support/engine_world.h"

#include <memory>
#include <utility>

#include "kernels/base/status_macros.h"
#include "parallel/thread_world.h"

namespace heddle {

EngineConfig TestEngineConfig(const std::string& model) {
  EngineConfig config;
  config.model = model;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = 64;
  config.num_kv_pages = 64;
  config.int8_activations = false;
  config.exchange_experts = false;  // whatever this machine is faster with
  config.num_threads = 1;
  config.num_stripes = 1;  // auto would measure the machine
  config.verify_every_step = true;
  return config;
}

absl::Status WithEngine(const EngineConfig& config, int num_ranks, OutputCallback on_output,
                        const std::function<absl::Status(Engine& engine)>& body) {
  ThreadWorldOptions options;
  options.size = num_ranks;
  ASSIGN_OR_RETURN(const std::unique_ptr<ThreadWorld> world, ThreadWorld::Create(options));
  const std::vector<absl::Status> statuses = world->Run([&](World& self) -> absl::Status {
    if (self.self.rank != 0) return ServeRank(config, self);
    ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::Create(config, self, on_output));
    return body(*engine);
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<EngineRun> RunRequests(const EngineConfig& config, int num_ranks,
                                      const std::vector<Request>& requests) {
  EngineRun run;
  run.results.resize(requests.size());
  Collector collector([&run](size_t place, std::vector<CollectedSequence> sequences) {
    run.results[place] = std::move(sequences);
  });
  const auto submit = [&](Engine& engine) -> absl::Status {
    for (size_t place = 0; place < requests.size(); ++place) {
      RETURN_IF_ERROR(collector.Submit(engine, place, requests[place]));
    }
    RETURN_IF_ERROR(engine.Drain());
    run.stats = engine.stats();
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(WithEngine(
      config, num_ranks, [&](RequestOutput output) { collector.Take(std::move(output)); }, submit));
  return run;
}

Request GreedyRequest(std::vector<int32_t> prompt, int64_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.params.max_tokens = max_tokens;
  request.params.temperature = 0.0;
  request.params.ignore_eos = true;
  return request;
}

}  // namespace heddle
