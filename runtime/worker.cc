#include "runtime/worker.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/kv_layout.h"
#include "cache/page_pool.h"
#include "kernels/backend_registry.h"
#include "kernels/base/ceil_div.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "parallel/startup_check.h"
#include "runtime/agreement.h"
#include "runtime/auto_placement.h"
#include "runtime/cpu_share.h"
#include "runtime/memory_share.h"
#include "runtime/model/decoder.h"
#include "runtime/model/mla_attention.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/weights.h"
#include "runtime/page_table_mirror.h"
#include "runtime/plan_inputs.h"
#include "runtime/sampling/prompt_scorer.h"
#include "runtime/sampling/sequence_state.h"

namespace heddle {
namespace {

constexpr int64_t kDefaultBatchedTokens = 2048;
constexpr int64_t kMaxLogitRows = 256;

// Fills in what the config leaves open, all but the number of pages.
absl::StatusOr<EngineLimits> ChooseLimits(const EngineConfig& config, const ModelSpec& spec) {
  const auto positive = [](absl::string_view flag, int64_t value) -> absl::Status {
    if (value >= 1) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(flag, ": expected at least 1, found ", value));
  };
  EngineLimits limits;
  limits.max_model_len =
      config.max_model_len > 0 ? config.max_model_len : spec.max_position_embeddings;
  const int64_t most = MaxContextLength(spec);
  if (limits.max_model_len > most) {
    return absl::InvalidArgumentError(absl::StrCat("--max-model-len ", limits.max_model_len,
                                                   " is above the model's limit of ", most,
                                                   " positions"));
  }
  limits.max_num_seqs = config.max_num_seqs;
  RETURN_IF_ERROR(positive("--max-num-seqs", limits.max_num_seqs));
  limits.max_num_batched_tokens = config.max_num_batched_tokens > 0
                                      ? config.max_num_batched_tokens
                                      : std::max(kDefaultBatchedTokens, limits.max_num_seqs);
  if (limits.max_num_batched_tokens < limits.max_num_seqs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max-num-batched-tokens ", limits.max_num_batched_tokens, " is below --max-num-seqs ",
        limits.max_num_seqs, ": a step must have room for a token of every sequence"));
  }
  limits.num_stripes = config.num_stripes.value_or(1);
  RETURN_IF_ERROR(positive("--decode-context-parallel-size", limits.num_stripes));
  if (!config.use_kv_cache && limits.num_stripes > 1) {
    return absl::InvalidArgumentError(absl::StrCat("--decode-context-parallel-size ",
                                                   limits.num_stripes,
                                                   ": without a cache there is nothing to stripe"));
  }
  if (!config.use_kv_cache && config.enable_dp_attention) {
    return absl::InvalidArgumentError(
        "--enable-dp-attention: it deals sequences by where their latents are cached, and "
        "--no-kv-cache keeps none; leave one of the two out");
  }
  if (!config.use_kv_cache) {
    // Every step computes whole sequences: the longest one must fit.
    limits.max_num_batched_tokens = std::max(limits.max_num_batched_tokens, limits.max_model_len);
  }
  limits.page_size = config.block_size > 0 ? config.block_size : DefaultPageSize(spec);
  if (config.num_kv_pages.has_value()) {
    RETURN_IF_ERROR(positive("--num-kv-pages", *config.num_kv_pages));
  }
  const double utilization = config.memory_utilization.value_or(1.0);
  if (!(utilization > 0.0 && utilization <= 1.0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--gpu-memory-utilization: expected a share above 0 and up to 1, found ", utilization));
  }
  return limits;
}

class ShardWorker : public Worker {
 public:
  ShardWorker(World& world, ModelSpec spec, EngineLimits limits, ShardLayout layout)
      : world_(world), spec_(std::move(spec)), limits_(limits), shard_layout_(std::move(layout)) {}

  // Opens the device, and says how many pages this rank could have in `free_memory` bytes.
  absl::StatusOr<int64_t> Open(const EngineConfig& config, int num_threads, int64_t free_memory) {
    BackendOptions backend_options;
    backend_options.device = config.device;
    backend_options.cpu.stream_mode = config.stream_mode;
    backend_options.cpu.num_threads = num_threads;
    ASSIGN_OR_RETURN(backend_, CreateBackend(backend_options));
    ASSIGN_OR_RETURN(stream_, backend_->CreateStream());
    if (!config.use_kv_cache) return 0;
    return NumPagesOf(config, limits_, layout(), shard_layout_.grid, free_memory);
  }

  // Collective: every rank gets the pages that the tightest can hold, and they can reach each
  // other.
  absl::Status Meet(int64_t num_pages) {
    ASSIGN_OR_RETURN(limits_.num_pages, world_.control->AllReduceMin(num_pages));
    return CheckAllReduce(world_, *backend_, *stream_);
  }

  absl::Status Load(const EngineConfig& config, Checkpoint& checkpoint, int64_t num_sampled_ids) {
    WeightLoadOptions load_options;
    load_options.dtype = config.dtype;
    load_options.on_progress = [this](absl::string_view) { world_.control->ReportProgress(); };
    ASSIGN_OR_RETURN(weights_, LoadWeights(spec_, shard_layout_, world_.self.rank,
                                           *checkpoint.weights, load_options, *backend_, *stream_));

    DecoderOptions decoder_options;
    if (config.use_kv_cache) {
      limits_.retention_window = layout().kv.RetentionWindow();
      ASSIGN_OR_RETURN(PagePool pool, PagePool::Create(*backend_, layout().kv, limits_.num_pages));
      decoder_options.pool = &pool_.emplace(std::move(pool));
    }
    decoder_options.limits = ChooseStepLimits(config);
    fill_options_ = {.limits = decoder_options.limits,
                     .page_size = limits_.page_size,
                     .stripe = layout().heads.stripe,
                     .num_stripes = shard_layout_.grid.num_stripes(),
                     .dp_attention = shard_layout_.grid.data_parallel(),
                     .has_cache = config.use_kv_cache,
                     .mla = spec_.mla.has_value(),
                     .absorb_prompts = config.decode_prompts};
    max_logit_rows_ = decoder_options.limits.max_logit_rows;
    decoder_options.max_model_len = limits_.max_model_len;
    decoder_options.precision =
        config.int8_activations ? ActivationPrecision::kInt8 : ActivationPrecision::kFloat32;
    decoder_options.on_layer = [this] { world_.control->ReportProgress(); };
    ASSIGN_OR_RETURN(inputs_, StepInputs::Create(decoder_options.limits, *backend_));
    ASSIGN_OR_RETURN(copy_sources_, StepArray<int32_t>::Create(limits_.max_num_seqs, *backend_));
    ASSIGN_OR_RETURN(copy_targets_, StepArray<int32_t>::Create(limits_.max_num_seqs, *backend_));
    ASSIGN_OR_RETURN(decoder_,
                     Decoder::Create(spec_, shard_layout_, world_.self.rank, *weights_,
                                     std::move(decoder_options), *backend_, *world_.communicator));
    SamplerOptions sampler_options;
    sampler_options.vocab_size = spec_.vocab_size;
    sampler_options.vocab_shards = shard_layout_.VocabularyShards();
    sampler_options.num_sampled_ids = num_sampled_ids;
    sampler_options.eos_token_ids = checkpoint.generation.eos_token_ids;
    ASSIGN_OR_RETURN(sampler_,
                     Sampler::Create(std::move(sampler_options), *backend_, *world_.communicator));
    ASSIGN_OR_RETURN(scorer_, PromptScorer::Create(shard_layout_.VocabularyShards(), *backend_,
                                                   *world_.communicator));
    slots_.resize(limits_.max_num_seqs);
    tables_.emplace(limits_.max_num_seqs, shard_layout_.grid.num_stripes(), limits_.num_pages);
    return absl::OkStatus();
  }

  absl::StatusOr<StepResult> Execute(const StepPlan& plan) override {
    if (plan.epoch != last_epoch_ + 1) {
      return absl::InternalError(absl::StrCat("step plan: epoch ", plan.epoch, " after ",
                                              last_epoch_, "; a plan was lost or repeated"));
    }
    last_epoch_ = plan.epoch;
    RETURN_IF_ERROR(ApplySlots(plan));
    RETURN_IF_ERROR(CopyPages(plan));
    if (plan.rows.empty()) return StepResult();

    ASSIGN_OR_RETURN(const PlanInputs filled,
                     FillPlanInputs(plan, fill_options_, slots_, *tables_, *inputs_));
    RETURN_IF_ERROR(inputs_->Upload(filled.shape, *backend_, *stream_));
    RETURN_IF_ERROR(decoder_->Forward(*inputs_, filled.shape, *stream_));
    StepResult result;
    if (!filled.sampled.empty()) {
      ASSIGN_OR_RETURN(
          const ConstMatrixView logits,
          decoder_->Logits(inputs_->logit_rows.device(), filled.shape.num_logit_rows, *stream_));
      ASSIGN_OR_RETURN(result.samples, sampler_->Sample(logits, filled.sampled, *stream_));
      RETURN_IF_ERROR(AppendSamples(plan, result.samples));
    }
    RETURN_IF_ERROR(stream_->Synchronize());
    RETURN_IF_ERROR(ScorePrompts(plan, filled.rows, result));
    return result;
  }

  const EngineLimits& limits() const override { return limits_; }
  const RankLayout& layout() const override { return shard_layout_.ranks[world_.self.rank]; }
  PagePool* page_pool() override { return pool_.has_value() ? &*pool_ : nullptr; }

 private:
  StepLimits ChooseStepLimits(const EngineConfig& config) const {
    // A row of MLA may be two sequences (see StepShape).
    const int64_t max_sequences = limits_.max_num_seqs * (spec_.mla.has_value() ? 2 : 1);
    StepLimits limits = {
        .max_tokens = limits_.max_num_batched_tokens,
        .max_sequences = max_sequences,
        .max_pages = max_sequences * CeilDiv(limits_.max_model_len, limits_.page_size),
        .max_logit_rows = std::max(limits_.max_num_seqs,
                                   std::min(limits_.max_num_batched_tokens, kMaxLogitRows))};
    if (spec_.mla.has_value()) {
      // The ranks of a stripe group gather every piece together, so it is the same for all.
      int64_t most_heads = 0;
      for (const RankLayout& rank : shard_layout_.ranks) {
        most_heads = std::max(most_heads, rank.heads.query_heads.size());
      }
      limits.max_piece_tokens = config.mla_piece_tokens > 0
                                    ? config.mla_piece_tokens
                                    : MlaPieceTokens(*spec_.mla, most_heads);
      limits.max_pieces = max_sequences * CeilDiv(limits_.max_model_len, limits.max_piece_tokens);
      // A sequence's first and last page may be partly in the piece.
      if (shard_layout_.grid.num_stripes() > 1 && !shard_layout_.grid.data_parallel()) {
        limits.max_piece_pages = limits.max_piece_tokens / limits_.page_size + 2 * max_sequences;
      }
    }
    return limits;
  }

  absl::Status ApplySlots(const StepPlan& plan) {
    RETURN_IF_ERROR(tables_->Apply(plan));
    for (const int32_t slot : plan.released_slots) slots_[slot].reset();
    for (const SlotAdmission& admission : plan.admissions) {
      if (admission.batch_slot < 0 || admission.batch_slot >= limits_.max_num_seqs) {
        return absl::InternalError(
            absl::StrCat("step plan: batch slot ", admission.batch_slot, " does not exist"));
      }
      slots_[admission.batch_slot].emplace(admission.params, admission.seed, admission.token_ids,
                                           admission.prompt_length);
    }
    if (plan.has_digest && plan.page_table_digest != tables_->Digest()) {
      return absl::InternalError("page tables differ from rank 0's");
    }
    return absl::OkStatus();
  }

  // Copies the pages of this rank's stripe, at most max_num_seqs at a time.
  absl::Status CopyPages(const StepPlan& plan) {
    const int stripe = layout().heads.stripe;
    int64_t count = 0;
    const auto flush = [&]() -> absl::Status {
      if (count == 0) return absl::OkStatus();
      RETURN_IF_ERROR(copy_sources_->Upload(count, *backend_, *stream_));
      RETURN_IF_ERROR(copy_targets_->Upload(count, *backend_, *stream_));
      RETURN_IF_ERROR(
          pool_->CopyPages(copy_sources_->device(), copy_targets_->device(), count, *stream_));
      count = 0;
      return stream_->Synchronize();
    };
    for (const PageOp& op : plan.page_ops) {
      if (op.source.stripe != stripe) continue;
      copy_sources_->host()[count] = op.source.slot;
      copy_targets_->host()[count] = op.target.slot;
      if (++count == limits_.max_num_seqs) RETURN_IF_ERROR(flush());
    }
    return flush();
  }

  absl::Status AppendSamples(const StepPlan& plan, const std::vector<SampledToken>& samples) {
    size_t next = 0;
    for (const PlanRow& row : plan.rows) {
      if (!row.sample) continue;
      const SampledToken& sample = samples[next++];
      // A failed row is released by the next plan.
      if (sample.status.ok()) slots_[row.batch_slot]->Append(sample.token_id);
    }
    return absl::OkStatus();
  }

  // Collective. Log-probabilities of the prompt tokens after each position of the rows that ask for
  // them, in pieces of the rows that the decoder can give logits of at once.
  absl::Status ScorePrompts(const StepPlan& plan, const std::vector<RowTokens>& places,
                            StepResult& result) {
    for (size_t i = 0; i < plan.rows.size(); ++i) {
      const PlanRow& row = plan.rows[i];
      const SequenceState& state = *slots_[row.batch_slot];
      const SamplingParams& params = state.params();
      if (params.ScoresPrompt() && row.first_position < state.prompt_length()) {
        StepResult::PromptScore score;
        score.row = static_cast<int32_t>(i);
        const int64_t num_scored =
            std::min<int64_t>(row.query_length, state.prompt_length() - row.first_position);
        for (int64_t done = 0; done < num_scored; done += max_logit_rows_) {
          RETURN_IF_ERROR(ScorePiece(state, places[i], row.first_position + done,
                                     std::min(max_logit_rows_, num_scored - done), score));
        }
        result.prompt_scores.push_back(std::move(score));
      }
    }
    return absl::OkStatus();
  }

  absl::Status ScorePiece(const SequenceState& state, const RowTokens& place,
                          int64_t first_position, int64_t count, StepResult::PromptScore& score) {
    std::vector<int32_t> targets(count, -1);
    int64_t num_targets = 0;
    for (int64_t i = 0; i < count; ++i) {
      inputs_->logit_rows.host()[i] = static_cast<int32_t>(place.TokenAt(first_position + i));
      if (first_position + i + 1 < state.prompt_length()) {
        targets[i] = state.token_ids()[first_position + i + 1];
        ++num_targets;
      }
    }
    RETURN_IF_ERROR(inputs_->logit_rows.Upload(count, *backend_, *stream_));
    ASSIGN_OR_RETURN(const ConstMatrixView logits,
                     decoder_->Logits(inputs_->logit_rows.device(), count, *stream_));
    ASSIGN_OR_RETURN(ScoredRows rows,
                     scorer_->Score(logits, targets, state.params().prompt_logits, *stream_));
    if (world_.self.rank != 0) return absl::OkStatus();
    score.logprobs.insert(score.logprobs.end(), rows.logprobs.begin(),
                          rows.logprobs.begin() + num_targets);
    score.logits.insert(score.logits.end(), rows.logits.begin(), rows.logits.end());
    return absl::OkStatus();
  }

  World& world_;
  const ModelSpec spec_;
  EngineLimits limits_;
  const ShardLayout shard_layout_;
  int64_t max_logit_rows_ = 0;

  // Memory goes before the backend, what points at memory before that.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::optional<ModelWeights> weights_;
  std::optional<PagePool> pool_;  // none without a cache
  std::optional<StepInputs> inputs_;
  PlanInputsOptions fill_options_;
  std::optional<StepArray<int32_t>> copy_sources_;
  std::optional<StepArray<int32_t>> copy_targets_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<PromptScorer> scorer_;

  uint64_t last_epoch_ = 0;
  std::optional<PageTableMirror> tables_;
  std::vector<std::optional<SequenceState>> slots_;  // [max_num_seqs]
};

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(const EngineConfig& config,
                                                       Checkpoint& checkpoint,
                                                       int64_t num_sampled_ids, World& world) {
  // What a rank can refuse it refuses before any weight is read, and all ranks together.
  ASSIGN_OR_RETURN(const int fair_threads, AgreeOnThreads(world));
  const int num_threads = config.num_threads > 0 ? config.num_threads : fair_threads;
  const int64_t free_memory = FreeMemory() / world.self.node_size;
  RETURN_IF_ERROR(WarnOfUnequalMemory(free_memory, world));
  int64_t num_pages = 0;
  absl::StatusOr<EngineLimits> limits = ChooseLimits(config, checkpoint.spec);
  RETURN_IF_ERROR(AgreeOnStatus(limits.status(), *world.control));
  ShardLayoutOptions options;
  options.num_ranks = world.self.size;
  options.dp_attention = config.enable_dp_attention;
  options.weight_dtype = config.dtype;
  options.kv_cache_dtype = config.kv_cache_dtype.value_or(DType::kFloat32);
  options.page_size = limits->page_size;
  options.expert_parallel = config.enable_expert_parallel;
  options.memory_bytes = free_memory;
  ASSIGN_OR_RETURN(options.exchange_experts,
                   ChooseExchangeOfJob(config, *limits, checkpoint.spec, *checkpoint.weights,
                                       options, num_threads, world));
  if (!config.num_stripes.has_value() && !config.enable_dp_attention) {
    ASSIGN_OR_RETURN(limits->num_stripes,
                     ChooseStripesOfJob(config, *limits, checkpoint.spec, *checkpoint.weights,
                                        options, num_threads, world));
  }
  options.num_stripes = static_cast<int>(limits->num_stripes);
  const auto prepare = [&]() -> absl::StatusOr<std::unique_ptr<ShardWorker>> {
    ASSIGN_OR_RETURN(ShardLayout layout,
                     BuildShardLayout(checkpoint.spec, *checkpoint.weights, options));
    limits->num_stripes = layout.grid.num_stripes();
    auto worker = std::make_unique<ShardWorker>(world, checkpoint.spec, *limits, std::move(layout));
    ASSIGN_OR_RETURN(num_pages, worker->Open(config, num_threads, free_memory));
    return worker;
  };
  absl::StatusOr<std::unique_ptr<ShardWorker>> worker = prepare();
  RETURN_IF_ERROR(AgreeOnStatus(worker.status(), *world.control));

  // From here on an error ends the job: nobody asks the others, who may read for minutes yet.
  const auto load = [&]() -> absl::Status {
    RETURN_IF_ERROR((*worker)->Meet(num_pages));
    RETURN_IF_ERROR((*worker)->Load(config, checkpoint, num_sampled_ids));
    return world.control->Barrier();
  };
  const absl::Status loaded = load();
  if (!loaded.ok()) world.control->Abort(loaded);
  RETURN_IF_ERROR(loaded);
  return std::unique_ptr<Worker>(*std::move(worker));
}

}  // namespace heddle
