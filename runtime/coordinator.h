// Rank 0's side of the engine: which requests are in flight, and what each step gave them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "parallel/control_channel.h"
#include "runtime/engine_stats.h"
#include "runtime/output_sequence.h"
#include "runtime/request.h"
#include "runtime/schedule/scheduler.h"
#include "runtime/text/tokenizer.h"
#include "runtime/worker.h"

namespace heddle {

// A request that passed the door: encoded, within every limit, its id free.
struct AdmittedRequest {
  std::string id;
  std::vector<int32_t> prompt_token_ids;
  SamplingParams params;
  int64_t max_tokens = 0;  // what the request asks for and the context leaves
  uint64_t seed = 0;
};

// Owned by the engine and used from its thread only. Every request that is added ends with exactly
// one finished output for each of its n sequences.
class Coordinator {
 public:
  struct Options {
    std::vector<int32_t> eos_token_ids;
    int64_t vocab_size = 0;
    bool verify_every_step = false;  // the ledger's integrity, whose breach is an error of Step
  };

  // `tokenizer` may be null. `on_output` is called from the methods below.
  Coordinator(Options options, std::unique_ptr<Scheduler> scheduler, const Tokenizer* tokenizer,
              std::function<void(RequestOutput)> on_output);

  void Add(AdmittedRequest request);
  // Ends all of the request's sequences with "abort"; unknown ids are ignored.
  void Abort(absl::string_view id);
  // Ends everything in flight with "error".
  void FailAll(const absl::Status& why);
  bool idle() const { return requests_.empty(); }
  bool Contains(absl::string_view id) const { return requests_.contains(id); }

  // Plans a step, sends the plan to all ranks, executes this rank's part and hands out what it
  // gave. An error is fatal for the job.
  absl::Status Step(Worker& worker, ControlChannel& control);
  // Tells the other ranks to return.
  absl::Status Shutdown(ControlChannel& control);

  EngineStats stats() const;
  void ResetStats();

 private:
  struct ActiveRequest;
  struct ActiveSequence {
    ActiveRequest* request = nullptr;
    int64_t index = 0;
    OutputSequence output;
    bool started = false;  // its first output has been handed out
  };
  struct ActiveRequest {
    AdmittedRequest admitted;
    int64_t num_unfinished = 0;
    std::vector<SequenceId> sequences;
    std::vector<float> prompt_logprobs;
    std::vector<float> prompt_logits;
  };

  void StartSequence(ActiveRequest& request, int64_t index);
  void TakeSample(SequenceId id, const SampledToken& sample);
  // DataLoss if the model gave no numbers.
  absl::Status TakePromptScore(SequenceId id, const PlanRow& row,
                               const StepResult::PromptScore& score);
  // The ledger's integrity; at idle, that nothing is held.
  absl::Status CheckPages() const;
  // Whether the row is the last of a request that wanted its prompt computed and nothing more.
  bool EndsPromptOnly(SequenceId id, const PlanRow& row) const;
  // Hands out a piece; if it ends the sequence, forgets it and, after its last one, the request.
  void Emit(SequenceId id, RequestOutput output);
  void EndSequence(SequenceId id, FinishReason reason, const absl::Status& error);
  void CountStep(const StepPlan& plan, double seconds);

  const Options options_;
  const Tokenizer* tokenizer_;
  const std::function<void(RequestOutput)> on_output_;
  const std::unique_ptr<Scheduler> scheduler_;
  SequenceId next_sequence_ = 1;
  uint64_t epoch_ = 0;
  // Requests and sequences in flight; pointers into the first stay valid.
  absl::flat_hash_map<std::string, std::unique_ptr<ActiveRequest>> requests_;
  absl::node_hash_map<SequenceId, ActiveSequence> sequences_;
  EngineStats stats_;
  double waste_sum_ = 0;
};

}  // namespace heddle
