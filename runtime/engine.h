// The only door to the engine: submit requests, get tokens.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "parallel/world.h"
#include "runtime/engine_config.h"
#include "runtime/engine_stats.h"
#include "runtime/request.h"
#include "runtime/text/tokenizer.h"

namespace heddle {

// Called on the engine's thread, in the order of the steps; must not block for long, and must not
// call Drain.
using OutputCallback = std::function<void(RequestOutput output)>;

// Lives on rank 0 and drives all ranks; the others are in ServeRank meanwhile. All methods are
// thread-safe. Owns one thread, which sleeps when there is no work.
class Engine {
 public:
  // Collective: every other rank must call ServeRank with the same config. `world` is borrowed and
  // outlives the engine. Refused input
  // (InvalidArgument, NotFound, ResourceExhausted, ...) is found before a weight is read.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineConfig& config, World& world,
                                                        OutputCallback on_output);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  // Aborts what is in flight, tells the other ranks to return and waits for the thread.
  ~Engine();

  // Checks the request at the door: InvalidArgument for a bad field, AlreadyExists for an id in
  // flight, ResourceExhausted for a prompt that the cache can never hold. No output follows an
  // error.
  absl::Status Submit(Request request);
  // Ends a request with "abort". Unknown ids are ignored: it may just have finished.
  void Abort(absl::string_view id);
  // Waits until nothing is in flight. An error if the engine died; every request in flight has then
  // got an output of kError.
  absl::Status Drain();

  EngineStats stats() const;
  void ResetStats();
  // Null when the model has none (dummy weights).
  const Tokenizer* tokenizer() const;
  int64_t vocab_size() const;
  int64_t max_model_len() const;
  // What the checkpoint's author suggests for requests that do not say.
  const GenerationDefaults& generation_defaults() const;

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The life of a rank other than 0: builds its shard, then executes step plans until rank 0 says
// goodbye. Returns the first error of this rank, or the one that ended the job.
absl::Status ServeRank(const EngineConfig& config, World& world);

}  // namespace heddle
