#include "runtime/engine.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "runtime/agreement.h"
#include "runtime/coordinator.h"
#include "runtime/random_seed.h"
#include "runtime/worker.h"

namespace heddle {
namespace {

// The ids that are never sampled begin here; the whole vocabulary without a tokenizer. Known to
// rank 0 alone, which reads the tokenizer, and told to the others.
absl::StatusOr<int64_t> ShareNumSampledIds(const Tokenizer* tokenizer, ControlChannel& control) {
  std::string message = std::to_string(tokenizer != nullptr ? tokenizer->vocab_size() : 0);
  RETURN_IF_ERROR(control.Broadcast(message));
  return std::stoll(message);
}

// Null, with a warning, if there is none.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(const Checkpoint& checkpoint) {
  const std::optional<GgufVocabulary>& gguf = checkpoint.gguf_vocabulary;
  if (gguf.has_value() && !gguf->model.empty()) return MakeGgufTokenizer(*gguf);
  absl::Status missing = absl::NotFoundError("the file has no tokenizer.ggml.model");
  if (!gguf.has_value()) {
    absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
        LoadTokenizer(checkpoint.tokenizer_directory);
    if (!absl::IsNotFound(tokenizer.status())) return tokenizer;
    missing = tokenizer.status();
  }
  LOG(WARNING) << "no tokenizer: prompts must be token ids, and there is no text ("
               << missing.message() << ")";
  return std::unique_ptr<Tokenizer>();
}

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineConfig& config, World& world, OutputCallback on_output)
      : config_(config), world_(world), on_output_(std::move(on_output)) {}

  ~Impl() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      wake_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  // The worker is made on the thread that will use it.
  absl::Status Start() {
    std::promise<absl::Status> started;
    std::future<absl::Status> result = started.get_future();
    thread_ = std::thread([this, &started] {
      const absl::Status status = Load();
      started.set_value(status);
      if (status.ok()) Run();
      worker_.reset();
    });
    return result.get();
  }

  absl::Status Submit(Request request) {
    ASSIGN_OR_RETURN(AdmittedRequest admitted, Admit(std::move(request)));
    const std::lock_guard<std::mutex> lock(mutex_);
    RETURN_IF_ERROR(failure_);
    if (!in_flight_.insert(admitted.id).second) {
      return absl::AlreadyExistsError(
          absl::StrCat("request id \"", admitted.id, "\" is in flight already"));
    }
    const uint64_t order = num_submitted_++;
    admitted.seed = admitted.params.seed.value_or(MixSeeds(config_.seed, order));
    inbox_.emplace_back(std::move(admitted));
    wake_.notify_all();
    return absl::OkStatus();
  }

  void Abort(absl::string_view id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    inbox_.emplace_back(std::string(id));
    wake_.notify_all();
  }

  absl::Status Drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    drained_.wait(lock, [this] { return in_flight_.empty(); });
    return failure_;
  }

  EngineStats stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void ResetStats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reset_stats_ = true;
    stats_ = WithSizes(EngineStats());
  }

  const Tokenizer* tokenizer() const { return tokenizer_.get(); }
  int64_t vocab_size() const { return vocab_size_; }
  int64_t max_model_len() const { return limits_.max_model_len; }
  const GenerationDefaults& generation_defaults() const { return generation_; }

 private:
  // A request, or the id of one to abort.
  using Message = std::variant<AdmittedRequest, std::string>;

  absl::Status Load() {
    absl::StatusOr<Checkpoint> checkpoint =
        OpenCheckpoint(config_.model, config_.load_format, config_.seed);
    absl::Status opened = checkpoint.status();
    if (opened.ok()) {
      absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = OpenTokenizer(*checkpoint);
      opened = tokenizer.status();
      if (opened.ok()) tokenizer_ = *std::move(tokenizer);
    }
    RETURN_IF_ERROR(AgreeOnStatus(opened, *world_.control));
    ASSIGN_OR_RETURN(const int64_t num_sampled_ids,
                     ShareNumSampledIds(tokenizer_.get(), *world_.control));
    ASSIGN_OR_RETURN(worker_, Worker::Create(config_, *checkpoint, num_sampled_ids, world_));

    limits_ = worker_->limits();
    vocab_size_ = checkpoint->spec.vocab_size;
    bos_id_ = tokenizer_ != nullptr ? tokenizer_->bos_id() : checkpoint->spec.bos_token_id;
    generation_ = checkpoint->generation;
    Coordinator::Options options;
    options.eos_token_ids = generation_.eos_token_ids;
    options.vocab_size = vocab_size_;
    options.verify_every_step = config_.verify_every_step;
    absl::StatusOr<std::unique_ptr<Scheduler>> scheduler = Scheduler::Create(ScheduleOptions());
    // The others already wait for plans.
    if (!scheduler.ok()) world_.control->Abort(scheduler.status());
    RETURN_IF_ERROR(scheduler.status());
    max_sequence_tokens_ = (*scheduler)->MaxSequenceTokens();
    coordinator_.emplace(std::move(options), *std::move(scheduler), tokenizer_.get(),
                         [this](RequestOutput output) { HandOut(std::move(output)); });
    stats_ = WithSizes(coordinator_->stats());
    LOG(INFO) << "model of " << vocab_size_ << " ids on " << world_.self.size << " rank(s); "
              << limits_.num_pages << " pages of " << limits_.page_size << " tokens a rank ("
              << limits_.num_pages * limits_.page_size * worker_->layout().kv.bytes_per_token()
              << " bytes on rank 0); at most " << limits_.max_num_seqs << " sequences, "
              << limits_.max_num_batched_tokens << " tokens a step, " << limits_.max_model_len
              << " tokens a sequence";
    return absl::OkStatus();
  }

  SchedulerOptions ScheduleOptions() const {
    SchedulerOptions options;
    options.max_num_seqs = limits_.max_num_seqs;
    options.max_num_batched_tokens = limits_.max_num_batched_tokens;
    options.max_model_len = limits_.max_model_len;
    options.prefill_chunk = config_.decode_prompts ? 1 : config_.prefill_chunk;
    options.use_kv_cache = config_.use_kv_cache;
    options.page_table_digest = config_.verify_every_step;
    options.cache.page_size = limits_.page_size;
    options.cache.num_stripes = limits_.num_stripes;
    options.cache.pages_per_stripe = limits_.num_pages;
    options.cache.one_stripe_per_sequence = config_.enable_dp_attention;
    options.cache.enable_prefix_caching = config_.enable_prefix_caching;
    options.cache.window = limits_.retention_window;
    options.cache.model_id = config_.model;
    options.cache.kv_dtype = config_.kv_cache_dtype.value_or(DType::kFloat32);
    return options;
  }

  // The engine's thread.
  void Run() {
    while (true) {
      std::vector<Message> messages;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (inbox_.empty() && coordinator_->idle()) {
          if (stopping_) break;
          const IdleScope idle(*world_.control);
          wake_.wait(lock, [this] { return stopping_ || !inbox_.empty(); });
        }
        messages.swap(inbox_);
        if (std::exchange(reset_stats_, false)) coordinator_->ResetStats();
        if (stopping_) {
          for (const std::string& id : in_flight_) messages.emplace_back(id);
        }
      }
      for (Message& message : messages) {
        if (auto* request = std::get_if<AdmittedRequest>(&message)) {
          coordinator_->Add(std::move(*request));
        } else {
          coordinator_->Abort(std::get<std::string>(message));
        }
      }
      if (!coordinator_->idle()) {
        const absl::Status status = coordinator_->Step(*worker_, *world_.control);
        if (!status.ok()) {
          Die(status);
          return;
        }
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!reset_stats_) stats_ = WithSizes(coordinator_->stats());
    }
    coordinator_->Shutdown(*world_.control).IgnoreError();
  }

  void Die(const absl::Status& status) {
    world_.control->Abort(status);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure_ = status;
    }
    coordinator_->FailAll(status);
    // Requests that had not reached the coordinator.
    std::vector<Message> messages;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      messages.swap(inbox_);
    }
    for (Message& message : messages) {
      if (auto* request = std::get_if<AdmittedRequest>(&message)) {
        coordinator_->Add(std::move(*request));
      }
    }
    coordinator_->FailAll(status);
  }

  void HandOut(RequestOutput output) {
    const std::string id = output.id;
    on_output_(std::move(output));
    if (coordinator_->Contains(id)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    in_flight_.erase(id);
    if (!in_flight_.empty()) return;
    if (!reset_stats_) stats_ = WithSizes(coordinator_->stats());
    drained_.notify_all();
  }

  // Everything about a request that could be refused.
  absl::StatusOr<AdmittedRequest> Admit(Request request) const {
    AdmittedRequest admitted;
    if (request.id.empty()) return absl::InvalidArgumentError("request id is empty");
    RETURN_IF_ERROR(ValidateSamplingParams(request.params, vocab_size_));
    if (auto* text = std::get_if<std::string>(&request.prompt)) {
      if (tokenizer_ == nullptr) {
        return absl::InvalidArgumentError(
            "the prompt is text but the model has no tokenizer; give token ids");
      }
      ASSIGN_OR_RETURN(admitted.prompt_token_ids, tokenizer_->Encode(*text, true));
    } else {
      admitted.prompt_token_ids = std::get<std::vector<int32_t>>(std::move(request.prompt));
    }
    std::vector<int32_t>& prompt = admitted.prompt_token_ids;
    if (prompt.empty() && bos_id_.has_value()) prompt.push_back(*bos_id_);
    if (prompt.empty()) {
      return absl::InvalidArgumentError(
          "the prompt is empty, and the model has no BOS token to start from");
    }
    for (size_t i = 0; i < prompt.size(); ++i) {
      if (prompt[i] < 0 || prompt[i] >= vocab_size_) {
        return absl::InvalidArgumentError(absl::StrCat("token id ", prompt[i], " at position ", i,
                                                       " is outside the vocabulary of ",
                                                       vocab_size_));
      }
    }
    const auto length = static_cast<int64_t>(prompt.size());
    const bool prompt_only = request.params.max_tokens == 0;
    const int64_t needed = length + (prompt_only ? 0 : 1);
    if (needed > limits_.max_model_len) {
      return absl::InvalidArgumentError(
          absl::StrCat("the prompt has ", length, " tokens; the context of ", limits_.max_model_len,
                       " leaves no room for output"));
    }
    if (needed > max_sequence_tokens_) {
      return absl::ResourceExhaustedError(absl::StrCat("the prompt needs room for ", needed,
                                                       " tokens; the cache has ",
                                                       max_sequence_tokens_, " for a sequence"));
    }
    const int64_t room = max_sequence_tokens_ - length;
    admitted.max_tokens = std::min(request.params.max_tokens.value_or(room), room);
    admitted.id = std::move(request.id);
    admitted.params = std::move(request.params);
    return admitted;
  }

  EngineStats WithSizes(EngineStats stats) const {
    stats.total_kv_pages = limits_.num_pages;
    stats.num_stripes = limits_.num_stripes;
    stats.kv_bytes_per_token = worker_->layout().kv.bytes_per_token();
    stats.weight_bytes = worker_->layout().weight_bytes;
    return stats;
  }

  const EngineConfig config_;
  World& world_;
  const OutputCallback on_output_;

  // Written while loading, constant afterwards.
  std::unique_ptr<Tokenizer> tokenizer_;
  EngineLimits limits_;
  int64_t vocab_size_ = 0;
  int64_t max_sequence_tokens_ = 0;
  std::optional<int32_t> bos_id_;
  GenerationDefaults generation_;

  // The engine thread's.
  std::unique_ptr<Worker> worker_;
  std::optional<Coordinator> coordinator_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;     // work or goodbye for the thread
  std::condition_variable drained_;  // in_flight_ became empty
  std::vector<Message> inbox_;
  absl::flat_hash_set<std::string> in_flight_;
  uint64_t num_submitted_ = 0;
  bool stopping_ = false;
  bool reset_stats_ = false;
  absl::Status failure_;
  EngineStats stats_;

  std::thread thread_;
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineConfig& config, World& world,
                                                       OutputCallback on_output) {
  auto impl = std::make_unique<Impl>(config, world, std::move(on_output));
  RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

absl::Status Engine::Submit(Request request) { return impl_->Submit(std::move(request)); }
void Engine::Abort(absl::string_view id) { impl_->Abort(id); }
absl::Status Engine::Drain() { return impl_->Drain(); }
EngineStats Engine::stats() const { return impl_->stats(); }
void Engine::ResetStats() { impl_->ResetStats(); }
const Tokenizer* Engine::tokenizer() const { return impl_->tokenizer(); }
int64_t Engine::vocab_size() const { return impl_->vocab_size(); }
int64_t Engine::max_model_len() const { return impl_->max_model_len(); }
const GenerationDefaults& Engine::generation_defaults() const {
  return impl_->generation_defaults();
}

absl::Status ServeRank(const EngineConfig& config, World& world) {
  absl::StatusOr<Checkpoint> checkpoint =
      OpenCheckpoint(config.model, config.load_format, config.seed);
  RETURN_IF_ERROR(AgreeOnStatus(checkpoint.status(), *world.control));
  ASSIGN_OR_RETURN(const int64_t num_sampled_ids, ShareNumSampledIds(nullptr, *world.control));
  ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                   Worker::Create(config, *checkpoint, num_sampled_ids, world));
  const auto serve = [&]() -> absl::Status {
    for (std::string message;;) {
      RETURN_IF_ERROR(world.control->Broadcast(message));
      ASSIGN_OR_RETURN(const StepPlan plan, ParseStepPlan(message));
      if (plan.shutdown) return absl::OkStatus();
      RETURN_IF_ERROR(worker->Execute(plan).status());
    }
  };
  absl::Status status = serve();
  if (!status.ok()) world.control->Abort(status);
  return status;
}

}  // namespace heddle
