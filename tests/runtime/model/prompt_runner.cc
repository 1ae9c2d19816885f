#include "tests/runtime/model/prompt_runner.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "cache/page_pool.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "parallel/thread_world.h"
#include "runtime/model/decoder.h"
#include "runtime/model/step_inputs.h"
#include "runtime/model/weights.h"
#include "runtime/sampling/prompt_scorer.h"
#include "runtime/shard_layout.h"

namespace heddle {
namespace {

// Few, so that the logits of a step come in several pieces.
constexpr int64_t kMaxLogitRows = 5;

int64_t NumPages(int64_t num_tokens, int64_t page_size) {
  return (num_tokens + page_size - 1) / page_size;
}

struct Sequence {
  int64_t prompt = 0;
  std::vector<int32_t> slots;  // of its pages
  int64_t num_done = 0;
};

// One rank of a run.
class Runner {
 public:
  Runner(const Prompts& prompts, const RunOptions& options, World& world)
      : prompts_(prompts), options_(options), world_(world) {}

  absl::Status Load(const std::string& model_path) {
    ASSIGN_OR_RETURN(checkpoint_, OpenCheckpoint(model_path, options_.load_format, /*seed=*/7));
    ASSIGN_OR_RETURN(ShardLayout layout,
                     BuildShardLayout(checkpoint_.spec, *checkpoint_.weights,
                                      {.num_ranks = options_.num_ranks,
                                       .kv_cache_dtype = options_.kv_cache_dtype,
                                       .page_size = options_.page_size}));
    layout_ = std::make_unique<ShardLayout>(std::move(layout));
    backend_ = CreateCpuBackend(
        {.num_threads = options_.num_threads, .stream_mode = options_.stream_mode});
    ASSIGN_OR_RETURN(stream_, backend_->CreateStream());
    const int rank = world_.self.rank;
    ASSIGN_OR_RETURN(weights_, LoadWeights(checkpoint_.spec, *layout_, rank, *checkpoint_.weights,
                                           {.dtype = options_.weight_dtype}, *backend_, *stream_));
    return absl::OkStatus();
  }

  absl::Status Prepare() {
    const int rank = world_.self.rank;
    StepLimits limits = {.max_tokens = 0,
                         .max_sequences = static_cast<int64_t>(prompts_.size()),
                         .max_pages = 1,
                         .max_logit_rows = kMaxLogitRows};
    for (const std::vector<int32_t>& prompt : prompts_) {
      limits.max_tokens += static_cast<int64_t>(prompt.size());
      limits.max_pages += NumPages(prompt.size(), options_.page_size);
    }
    // Every token's row is listed once; the logits are then computed a few rows at a time.
    StepLimits input_limits = limits;
    input_limits.max_logit_rows = limits.max_tokens;
    ASSIGN_OR_RETURN(inputs_, StepInputs::Create(input_limits, *backend_));
    if (options_.use_cache) {
      ASSIGN_OR_RETURN(PagePool pool,
                       PagePool::Create(*backend_, layout_->ranks[rank].kv, limits.max_pages));
      pool_ = std::make_unique<PagePool>(std::move(pool));
      RETURN_IF_ERROR(pool_->Fill(0xFF, *stream_));
    }
    DecoderOptions decoder_options = {.limits = limits,
                                      .max_model_len = options_.max_model_len,
                                      .precision = options_.precision,
                                      .pool = pool_.get()};
    if (rank == 0) {
      decoder_options.on_layer = options_.on_layer;
      decoder_options.tap = options_.tap;
    }
    ASSIGN_OR_RETURN(decoder_, Decoder::Create(checkpoint_.spec, *layout_, rank, weights_,
                                               decoder_options, *backend_, *world_.communicator));
    ASSIGN_OR_RETURN(scorer_, PromptScorer::Create(layout_->VocabularyShards(), *backend_,
                                                   *world_.communicator));
    std::vector<int32_t> slots(limits.max_pages);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(3));
    for (size_t i = 0; i < prompts_.size(); ++i) {
      Sequence& sequence = sequences_.emplace_back();
      sequence.prompt = static_cast<int64_t>(i);
      const int64_t pages = NumPages(prompts_[i].size(), options_.page_size);
      sequence.slots.assign(slots.end() - pages, slots.end());
      slots.resize(slots.size() - pages);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::vector<float>>> Run() {
    logits_.resize(prompts_.size());
    for (;;) {
      std::vector<Sequence*> batch;
      for (Sequence& sequence : sequences_) {
        if (sequence.num_done == PromptSize(sequence)) continue;
        batch.push_back(&sequence);
        if (options_.one_at_a_time) break;
      }
      if (batch.empty()) return std::move(logits_);
      RETURN_IF_ERROR(Step(batch));
    }
  }

 private:
  int64_t PromptSize(const Sequence& sequence) const {
    return static_cast<int64_t>(prompts_[sequence.prompt].size());
  }

  absl::Status Step(const std::vector<Sequence*>& batch) {
    StepShape shape;
    inputs_.query_starts.host()[0] = 0;
    inputs_.page_starts.host()[0] = 0;
    std::vector<int64_t> counts;
    for (const Sequence* sequence : batch) {
      counts.push_back(AddRow(*sequence, shape));
      ++shape.num_sequences;
      inputs_.query_starts.host()[shape.num_sequences] = static_cast<int32_t>(shape.num_tokens);
      inputs_.page_starts.host()[shape.num_sequences] = static_cast<int32_t>(shape.num_pages);
    }
    for (int64_t i = 0; i < shape.num_tokens; ++i) inputs_.logit_rows.host()[i] = i;
    shape.num_logit_rows = shape.num_tokens;
    shape.own_tokens = {0, shape.num_tokens};
    RETURN_IF_ERROR(inputs_.Upload(shape, *backend_, *stream_));
    RETURN_IF_ERROR(Forward(shape));

    std::vector<float> step_logits;
    for (int64_t begin = 0; begin < shape.num_tokens; begin += kMaxLogitRows) {
      const int64_t rows = std::min(kMaxLogitRows, shape.num_tokens - begin);
      ASSIGN_OR_RETURN(const ConstMatrixView view,
                       decoder_->Logits(inputs_.logit_rows.device() + begin, rows, *stream_));
      const std::vector<int32_t> no_targets(rows, -1);
      ASSIGN_OR_RETURN(const ScoredRows scored,
                       scorer_->Score(view, no_targets, /*want_logits=*/true, *stream_));
      step_logits.insert(step_logits.end(), scored.logits.begin(), scored.logits.end());
    }
    auto next = step_logits.begin();
    for (size_t i = 0; i < batch.size(); ++i) {
      batch[i]->num_done += counts[i];
      if (world_.self.rank != 0) continue;
      const auto end = next + counts[i] * checkpoint_.spec.vocab_size;
      std::vector<float>& all = logits_[batch[i]->prompt];
      all.insert(all.end(), next, end);
      next = end;
    }
    return absl::OkStatus();
  }

  absl::Status Forward(const StepShape& shape) {
    if (!options_.replay) return decoder_->Forward(inputs_, shape, *stream_);
    if (recording_ == nullptr) {
      RETURN_IF_ERROR(backend_->BeginCapture(*stream_));
      RETURN_IF_ERROR(decoder_->Forward(inputs_, shape, *stream_));
      ASSIGN_OR_RETURN(recording_, backend_->EndCapture(*stream_));
      recorded_tokens_ = shape.num_tokens;
    }
    CHECK_EQ(shape.num_tokens, recorded_tokens_);
    return backend_->Replay(*recording_, *stream_);
  }

  // Appends the sequence's next tokens to the step; returns how many.
  int64_t AddRow(const Sequence& sequence, StepShape& shape) {
    const int64_t first = sequence.num_done;
    const int64_t count = std::min(options_.chunk, PromptSize(sequence) - first);
    const int64_t page_size = options_.page_size;
    for (int64_t position = first; position < first + count; ++position) {
      const int64_t row = shape.num_tokens++;
      inputs_.token_ids.host()[row] = prompts_[sequence.prompt][position];
      inputs_.positions.host()[row] = static_cast<int32_t>(position);
      inputs_.append_slots.host()[row] = sequence.slots[position / page_size];
      inputs_.append_offsets.host()[row] = static_cast<int32_t>(position % page_size);
    }
    const int64_t window = layout_->ranks[world_.self.rank].kv.RetentionWindow();
    for (int64_t page = 0; page < NumPages(first + count, page_size); ++page) {
      if (window > 0 && (page + 1) * page_size <= first + 1 - window) continue;
      inputs_.pages.host()[shape.num_pages++] = {
          .slot = sequence.slots[page],
          .num_valid = static_cast<int32_t>(std::min(page_size, first + count - page * page_size)),
          .first_position = static_cast<int32_t>(page * page_size)};
    }
    return count;
  }

  const Prompts& prompts_;
  const RunOptions& options_;
  World& world_;
  Checkpoint checkpoint_;
  std::unique_ptr<ShardLayout> layout_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  ModelWeights weights_;
  std::unique_ptr<PagePool> pool_;
  StepInputs inputs_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<PromptScorer> scorer_;
  std::unique_ptr<Graph> recording_;
  int64_t recorded_tokens_ = 0;
  std::vector<Sequence> sequences_;
  std::vector<std::vector<float>> logits_;  // on rank 0
};

}  // namespace

absl::StatusOr<std::vector<std::vector<float>>> PromptLogits(const std::string& model_path,
                                                             const Prompts& prompts,
                                                             const RunOptions& options) {
  SetMinLogSeverity(LogSeverity::kError);
  CHECK(options.use_cache || options.chunk >= (1 << 20)) << "without a cache prompts are whole";
  ASSIGN_OR_RETURN(const std::unique_ptr<ThreadWorld> job,
                   ThreadWorld::Create({.size = options.num_ranks}));
  std::vector<std::vector<float>> logits;
  const std::vector<absl::Status> results = job->Run([&](World& world) {
    Runner runner(prompts, options, world);
    RETURN_IF_ERROR(runner.Load(model_path));
    RETURN_IF_ERROR(runner.Prepare());
    ASSIGN_OR_RETURN(std::vector<std::vector<float>> own, runner.Run());
    if (world.self.rank == 0) logits = std::move(own);
    return absl::OkStatus();
  });
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  return logits;
}

}  // namespace heddle
