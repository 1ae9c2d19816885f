#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/backend_registry.h"
#include "kernels/base/ceil_div.h"
#include "kernels/base/status_macros.h"
#include "launch/commands/batch_cell.h"
#include "launch/commands/batch_chart.h"
#include "launch/commands/batch_report.h"
#include "launch/commands/bench_figures.h"
#include "launch/commands/collector.h"
#include "launch/commands/commands.h"
#include "launch/commands/layout_flags.h"
#include "launch/commands/result_file.h"
#include "runtime/agreement.h"
#include "runtime/auto_placement.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cost_model.h"
#include "runtime/cpu_share.h"
#include "runtime/device_table.h"
#include "runtime/engine.h"
#include "runtime/model/model_spec.h"
#include "runtime/random_seed.h"
#include "runtime/shard_layout.h"

namespace heddle {
namespace {

using Tokens = std::vector<int32_t>;

constexpr int64_t kBatchedTokens = 2048;  // of a step, unless the batch or a flag says more

// A sweep whose flags were found to fit together; the same on every rank.
struct Sweep {
  CommandLine line;
  ModelCosts model;
  int64_t page_size = 0;
  std::vector<EngineConfig> placements;
};

// Where the figures go; null where nothing was asked for.
struct SweepFiles {
  std::shared_ptr<ResultFile> json;
  std::shared_ptr<ResultFile> plot;
};

// Tokens to generate of each sequence of a batch, so that so many steps are common to all. Prompts
// come out of the prefix cache but for a page at most, and what is left takes a few steps to
// compute, in which those that are done already decode.
int64_t OutputTokens(const BenchBatchFlags& flags, const EngineConfig& config, int64_t page_size,
                     int64_t input_len, int64_t batch_size) {
  const int64_t left = std::min(page_size, input_len);
  const int64_t room = config.max_num_batched_tokens - batch_size;  // for prompts, at least
  int64_t steps_to_start = CeilDiv(batch_size * left, room);
  if (config.prefill_chunk > 0) steps_to_start += CeilDiv(left, config.prefill_chunk);
  return 1 + steps_to_start + flags.num_iters_warmup + flags.num_iters;
}

absl::Status CheckRange(absl::string_view flag, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " ", value, ": expected ", least, " to ", most));
}

absl::Status CheckFlags(const CommandLine& line) {
  const BenchBatchFlags& flags = line.bench_batch;
  for (const int64_t batch_size : flags.batch_sizes) {
    RETURN_IF_ERROR(CheckRange("--batch-size", batch_size, 1, kLargestBatch));
    if (batch_size > line.engine.max_num_seqs) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--batch-size ", batch_size, " is above --max-num-seqs ", line.engine.max_num_seqs));
    }
  }
  for (const int64_t input_len : flags.input_lens) {
    RETURN_IF_ERROR(CheckRange("--input-len", input_len, 1, kLongestContext));
  }
  RETURN_IF_ERROR(CheckRange("--num-iters", flags.num_iters, 1, kLongestContext));
  RETURN_IF_ERROR(CheckRange("--num-iters-warmup", flags.num_iters_warmup, 0, kLongestContext));
  if (!line.engine.use_kv_cache) {
    return absl::InvalidArgumentError(
        "--no-kv-cache: bench batch measures how tokens are decoded from a cache");
  }
  if (!line.engine.enable_prefix_caching) {
    return absl::InvalidArgumentError(
        "--no-enable-prefix-caching: bench batch takes prompts that it has computed before out of "
        "the prefix cache");
  }
  if (!flags.plot.empty() && !absl::EndsWith(flags.plot, ".svg") &&
      !absl::EndsWith(flags.plot, ".html")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--plot \"", flags.plot, "\": expected a file name in .svg or .html"));
  }
  return absl::OkStatus();
}

// One engine for all cells of a placement: wide and long enough for the largest.
absl::StatusOr<EngineConfig> ConfigOfAll(const CommandLine& line, const ModelSpec& spec,
                                         int64_t page_size) {
  const BenchBatchFlags& flags = line.bench_batch;
  EngineConfig config = line.engine;
  const int64_t largest_batch =
      *std::max_element(flags.batch_sizes.begin(), flags.batch_sizes.end());
  const int64_t longest_input = *std::max_element(flags.input_lens.begin(), flags.input_lens.end());
  const int64_t least_tokens = 2 * config.max_num_seqs;
  if (config.max_num_batched_tokens == 0) {
    config.max_num_batched_tokens = std::max(kBatchedTokens, least_tokens);
  } else if (config.max_num_batched_tokens < least_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max-num-batched-tokens ", config.max_num_batched_tokens, ": expected at least ",
        least_tokens, ", twice --max-num-seqs, so that prompts do not wait long for each other"));
  }
  const int64_t needed =
      longest_input + OutputTokens(flags, config, page_size, longest_input, largest_batch);
  const int64_t longest = config.max_model_len > 0 ? config.max_model_len : MaxContextLength(spec);
  if (needed > longest) {
    return absl::InvalidArgumentError(
        absl::StrCat("--input-len ", longest_input,
                     " and the tokens decoded after it need a context of ", needed, " tokens; ",
                     config.max_model_len > 0 ? "--max-model-len" : "the model", " has ", longest));
  }
  if (config.max_model_len == 0) config.max_model_len = needed;
  return config;
}

absl::StatusOr<Sweep> PlanSweep(const CommandLine& line, int num_ranks) {
  RETURN_IF_ERROR(CheckFlags(line));
  Sweep sweep;
  sweep.line = line;
  ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                   OpenCheckpoint(line.engine.model, line.engine.load_format, line.engine.seed));
  ASSIGN_OR_RETURN(ShardLayoutOptions options, LayoutOptionsOf(line, checkpoint.spec));
  options.num_ranks = num_ranks;
  options.kv_cache_dtype = line.engine.kv_cache_dtype.value_or(DType::kFloat32);
  sweep.page_size = options.page_size;
  sweep.model =
      CostsOf(checkpoint.spec, *checkpoint.weights, options.kv_cache_dtype, options.weight_dtype);
  ASSIGN_OR_RETURN(EngineConfig config, ConfigOfAll(line, checkpoint.spec, sweep.page_size));
  const auto add = [&](std::optional<int64_t> num_stripes, bool dp_attention) -> absl::Status {
    // Refused here if it cannot run.
    options.num_stripes =
        static_cast<int>(std::min<int64_t>(num_stripes.value_or(1), kLongestContext));
    options.dp_attention = dp_attention;
    config.num_stripes = num_stripes;
    config.enable_dp_attention = dp_attention;
    sweep.placements.push_back(config);
    return BuildShardLayout(checkpoint.spec, *checkpoint.weights, options).status();
  };
  // With data-parallel attention, only the stripes that were asked for are swept beside it.
  const std::vector<std::optional<int64_t>>& stripes = line.bench_batch.num_stripes;
  const bool dp_attention = line.engine.enable_dp_attention;
  const bool alone = dp_attention && stripes == std::vector{std::optional<int64_t>()};
  if (!alone) {
    for (const std::optional<int64_t> num_stripes : stripes)
      RETURN_IF_ERROR(add(num_stripes, false));
  }
  if (dp_attention) RETURN_IF_ERROR(add(std::nullopt, true));
  return sweep;
}

// Collective: what a rank can do while all are as busy, the same on all.
absl::StatusOr<DeviceFigures> Measure(const EngineConfig& config, World& world) {
  ASSIGN_OR_RETURN(const int fair_threads, AgreeOnThreads(world));
  BackendOptions options;
  options.cpu.num_threads = config.num_threads > 0 ? config.num_threads : fair_threads;
  ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, CreateBackend(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->CreateStream());
  return MeasureRanks(world, *backend, *stream);
}

// Owns the engine of a placement and decodes batches with it: first the prompts alone, which then
// lie in the prefix cache, and right after them the batch, whose sequences so start within a few
// steps of each other.
class BatchDecoder {
 public:
  static absl::StatusOr<std::unique_ptr<BatchDecoder>> Start(const EngineConfig& config,
                                                             World& world) {
    auto decoder = std::make_unique<BatchDecoder>();
    ASSIGN_OR_RETURN(decoder->engine_,
                     Engine::Create(config, world, [raw = decoder.get()](RequestOutput output) {
                       raw->collector_.Take(std::move(output));
                     }));
    return decoder;
  }

  const Engine& engine() const { return *engine_; }

  // When the tokens of each sequence came.
  absl::StatusOr<std::vector<std::vector<double>>> Run(const std::vector<Tokens>& prompts,
                                                       int64_t output_tokens, uint64_t seed) {
    requests_.clear();
    for (const Tokens& prompt : prompts) {
      Request& request = requests_.emplace_back();
      request.prompt = prompt;
      request.params.ignore_eos = true;
      request.params.temperature = 1.0;
      request.params.seed = seed + requests_.size();
      request.params.max_tokens = output_tokens;
    }
    num_prompts_done_ = 0;
    token_seconds_.assign(prompts.size(), {});
    status_ = absl::OkStatus();
    for (size_t i = 0; i < requests_.size(); ++i) {
      Request prompt_alone = requests_[i];
      prompt_alone.params.max_tokens = 1;
      const absl::Status status = collector_.Submit(*engine_, i, prompt_alone);
      if (!status.ok()) {
        engine_->Drain().IgnoreError();
        return status;
      }
    }
    RETURN_IF_ERROR(engine_->Drain());
    RETURN_IF_ERROR(status_);
    return token_seconds_;
  }

 private:
  // On the engine's thread, between two steps: what is submitted here starts together. Places
  // behind the prompts' are those of the batch.
  void Finish(size_t place, const CollectedSequence& sequence) {
    if (!status_.ok()) return;
    status_ = sequence.error;
    const size_t batch_size = requests_.size();
    if (place >= batch_size) {
      token_seconds_[place - batch_size] = sequence.token_seconds;
      return;
    }
    if (++num_prompts_done_ < batch_size) return;
    for (size_t i = 0; i < batch_size && status_.ok(); ++i) {
      status_ = collector_.Submit(*engine_, batch_size + i, requests_[i]);
    }
  }

  // The engine's thread uses these while Run waits in Drain, which orders the two.
  std::vector<Request> requests_;
  size_t num_prompts_done_ = 0;
  std::vector<std::vector<double>> token_seconds_;
  absl::Status status_;
  Collector collector_{[this](size_t place, std::vector<CollectedSequence> sequences) {
    Finish(place, sequences.front());
  }};
  std::unique_ptr<Engine> engine_;  // last: its thread uses the rest
};

// Why the cache cannot hold the batch; empty if it can. Pages are whole.
std::string WhyNoRoom(const BatchCell& cell, int64_t tokens_per_sequence, int64_t page_size,
                      const EngineStats& stats) {
  const int64_t pages_per_sequence = CeilDiv(tokens_per_sequence, page_size);
  // Whole sequences lie on one rank each with data-parallel attention.
  const int64_t num_ranks = cell.placement.num_ranks;
  const bool dealt = cell.placement.dp_attention;
  const int64_t sequences = dealt ? CeilDiv(cell.batch_size, num_ranks) : cell.batch_size;
  const int64_t pages = dealt ? stats.total_kv_pages : stats.total_kv_pages * stats.num_stripes;
  if (sequences * pages_per_sequence <= pages) return "";
  return absl::StrCat("needs ", sequences * pages_per_sequence * page_size,
                      " tokens of cache; there are ", pages * page_size,
                      dealt ? " on each rank" : "");
}

class SweepRun {
 public:
  SweepRun(const Sweep& sweep, const DeviceFigures& device, World& world)
      : sweep_(sweep), flags_(sweep.line.bench_batch), world_(world) {
    report_.model = sweep.line.engine.model;
    report_.num_ranks = world.self.size;
    report_.num_iters = flags_.num_iters;
    report_.num_iters_warmup = flags_.num_iters_warmup;
    report_.device = device;
    Print(TableHead(report_));
  }

  const BatchReport& report() const { return report_; }

  // Every cell of a placement whose engine runs.
  absl::Status Measure(const EngineConfig& config, BatchDecoder& decoder) {
    const EngineStats stats = decoder.engine().stats();
    BatchCell cell;
    const bool dp_attention = config.enable_dp_attention && world_.self.size > 1;
    cell.placement = {.num_ranks = world_.self.size,
                      .num_stripes = dp_attention ? 1 : static_cast<int>(stats.num_stripes),
                      .dp_attention = dp_attention,
                      .expert_parallel = config.enable_expert_parallel};
    const bool chosen = !config.num_stripes.has_value() && !dp_attention && world_.self.size > 1;
    cell.placement_name = chosen ? absl::StrCat("auto (", stats.num_stripes, ")")
                                 : PlacementName(sweep_.model.spec, cell.placement);
    for (const int64_t input_len : flags_.input_lens) {
      for (const int64_t batch_size : flags_.batch_sizes) {
        cell.input_len = input_len;
        cell.batch_size = batch_size;
        RETURN_IF_ERROR(MeasureCell(config, stats, decoder, cell));
      }
    }
    return absl::OkStatus();
  }

 private:
  static void Print(const std::string& text) {
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }

  // They differ from their first token on, so that they share no page. A short one is the start of
  // a long one, which then finds it in the prefix cache.
  static std::vector<Tokens> Prompts(const BatchCell& cell, int64_t vocab_size, uint64_t seed) {
    std::vector<Tokens> prompts;
    for (int64_t i = 0; i < cell.batch_size; ++i) {
      std::mt19937_64 random(MixSeeds(seed, static_cast<uint64_t>(i)));
      prompts.push_back(RandomTokens(cell.input_len, vocab_size, random));
      prompts.back().front() = static_cast<int32_t>(i % vocab_size);
    }
    return prompts;
  }

  absl::Status MeasureCell(const EngineConfig& config, const EngineStats& stats,
                           BatchDecoder& decoder, BatchCell cell) {
    const int64_t output_tokens =
        OutputTokens(flags_, config, sweep_.page_size, cell.input_len, cell.batch_size);
    cell.skipped = WhyNoRoom(cell, cell.input_len + output_tokens, sweep_.page_size, stats);
    if (cell.skipped.empty()) {
      const uint64_t seed = sweep_.line.engine.seed;
      const std::vector<Tokens> prompts = Prompts(cell, decoder.engine().vocab_size(), seed);
      ASSIGN_OR_RETURN(const std::vector<std::vector<double>> token_seconds,
                       decoder.Run(prompts, output_tokens, seed));
      cell.steps =
          CommonSteps(token_seconds, cell.input_len, flags_.num_iters_warmup, flags_.num_iters);
      const auto num_steps = static_cast<int64_t>(cell.steps.seconds.size());
      if (num_steps < flags_.num_iters) {
        cell.skipped = absl::StrCat("only ", num_steps, " steps had all sequences, as the cache ",
                                    "could not keep all prompts");
      } else {
        Predict(sweep_.model, report_.device, cell);
      }
    }
    Print(TableRow(cell, report_.device));
    report_.cells.push_back(std::move(cell));
    return absl::OkStatus();
  }

  const Sweep& sweep_;
  const BenchBatchFlags& flags_;
  World& world_;
  BatchReport report_;
};

absl::Status WriteFiles(const Sweep& sweep, const BatchReport& report, const RankInfo& self,
                        const SweepFiles& files) {
  RETURN_IF_ERROR(WriteJson(BatchJson(report, BenchHead(sweep.line, self)), files.json.get()));
  if (files.plot == nullptr) return absl::OkStatus();
  const bool as_page = absl::EndsWith(sweep.line.bench_batch.plot, ".html");
  const BatchChart chart = ChartOf(report);
  files.plot->WriteLine(as_page ? BatchChartHtml(chart) : BatchChartSvg(chart));
  return files.plot->Close();
}

// Rank 0's part. Before each placement the ranks agree to go on.
absl::StatusOr<int> Drive(const Sweep& sweep, const SweepFiles& files, World& world) {
  ASSIGN_OR_RETURN(const DeviceFigures device, Measure(sweep.line.engine, world));
  SweepRun run(sweep, device, world);
  absl::Status status;
  for (const EngineConfig& config : sweep.placements) {
    RETURN_IF_ERROR(AgreeOnStatus(status, *world.control));
    ASSIGN_OR_RETURN(const std::unique_ptr<BatchDecoder> decoder,
                     BatchDecoder::Start(config, world));
    status = run.Measure(config, *decoder);
  }
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(WriteFiles(sweep, run.report(), world.self, files));
  return kExitOk;
}

absl::StatusOr<int> Follow(const Sweep& sweep, World& world) {
  RETURN_IF_ERROR(Measure(sweep.line.engine, world).status());
  for (const EngineConfig& config : sweep.placements) {
    RETURN_IF_ERROR(AgreeOnStatus(absl::OkStatus(), *world.control));
    RETURN_IF_ERROR(ServeRank(config, world));
  }
  return kExitOk;
}

}  // namespace

absl::StatusOr<EngineCommand> PrepareBenchBatch(const CommandLine& line, const RankInfo& self) {
  ASSIGN_OR_RETURN(const Sweep sweep, PlanSweep(line, self.size));
  if (self.rank != 0) return [sweep](World& world) { return Follow(sweep, world); };
  SweepFiles files;
  ASSIGN_OR_RETURN(files.json, OpenResult(line.bench_batch.output_json));
  ASSIGN_OR_RETURN(files.plot, OpenResult(line.bench_batch.plot));
  return [sweep, files](World& world) { return Drive(sweep, files, world); };
}

}  // namespace heddle
