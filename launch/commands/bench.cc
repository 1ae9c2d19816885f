#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/status_macros.h"
#include "launch/commands/bench_figures.h"
#include "launch/commands/collector.h"
#include "launch/commands/commands.h"
#include "launch/commands/progress.h"
#include "launch/commands/result_file.h"
#include "nlohmann/json.hpp"
#include "runtime/engine.h"
#include "runtime/random_seed.h"

namespace heddle {
namespace {

using Json = nlohmann::ordered_json;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A request of random tokens that runs to its full length.
Request RandomRequest(int64_t input_len, int64_t output_len, int64_t vocab_size,
                      std::mt19937_64& random) {
  Request request;
  request.prompt = RandomTokens(input_len, vocab_size, random);
  request.params.max_tokens = output_len;
  request.params.ignore_eos = true;
  request.params.temperature = 1.0;
  request.params.seed = random();
  return request;
}

// What one batch of requests gave.
struct Run {
  double seconds = 0;
  int64_t num_failed = 0;  // refused, or ended short of their length
  int64_t num_prompt_tokens = 0;
  int64_t num_output_tokens = 0;
  std::vector<double> first_token_seconds;  // of each request, from the submission of all
  std::vector<double> token_gaps;           // seconds between tokens of a sequence
};

// Owns the engine of a bench and runs batches through it.
class BenchEngine {
 public:
  static absl::StatusOr<std::unique_ptr<BenchEngine>> Start(const EngineConfig& config,
                                                            World& world) {
    auto bench = std::make_unique<BenchEngine>();
    ASSIGN_OR_RETURN(bench->engine_,
                     Engine::Create(config, world, [raw = bench.get()](auto output) {
                       raw->collector_.Take(std::move(output));
                     }));
    return bench;
  }

  Engine& engine() { return *engine_; }

  absl::StatusOr<Run> RunBatch(const std::vector<Request>& requests, Progress* progress) {
    run_ = Run();
    requests_ = &requests;
    progress_ = progress;
    start_ = Seconds();
    for (size_t place = 0; place < requests.size(); ++place) {
      const absl::Status status = collector_.Submit(*engine_, place, requests[place]);
      // One that is refused would be refused every time: the figures would be of something else.
      if (!status.ok()) {
        engine_->Drain().IgnoreError();
        return Annotate(status, absl::StrCat("request ", place));
      }
    }
    RETURN_IF_ERROR(engine_->Drain());
    run_.seconds = Seconds() - start_;
    return run_;
  }

 private:
  void Finish(size_t place, const CollectedSequence& sequence) {
    const auto num_tokens = static_cast<int64_t>(sequence.token_ids.size());
    if (num_tokens != *(*requests_)[place].params.max_tokens) ++run_.num_failed;
    run_.num_prompt_tokens += static_cast<int64_t>(sequence.prompt_token_ids.size());
    run_.num_output_tokens += num_tokens;
    const std::vector<double>& times = sequence.token_seconds;
    if (!times.empty()) run_.first_token_seconds.push_back(times.front() - start_);
    for (size_t i = 1; i < times.size(); ++i) run_.token_gaps.push_back(times[i] - times[i - 1]);
    if (progress_ != nullptr) progress_->Advance();
  }

  // Written on the engine's thread while RunBatch waits in Drain, which orders the two.
  Run run_;
  const std::vector<Request>* requests_ = nullptr;
  Progress* progress_ = nullptr;
  double start_ = 0;
  Collector collector_{[this](size_t place, std::vector<CollectedSequence> sequences) {
    Finish(place, sequences.front());
  }};
  std::unique_ptr<Engine> engine_;  // last: its thread uses the rest
};

// `seconds`: of the runs that `stats` covers.
void AddEngineFigures(const EngineStats& stats, double seconds, Json& json) {
  const double steps = static_cast<double>(std::max<int64_t>(stats.num_steps, 1));
  json["steps"] = stats.num_steps;
  json["idle_share"] =
      std::max(0.0, 1.0 - stats.step_seconds / seconds);  // of rank 0, not in steps
  json["mean_batch"] = static_cast<double>(stats.num_scheduled_sequences) / steps;
  json["computed_tokens"] = stats.num_computed_tokens;
  json["preemptions"] = stats.num_preemptions;
  json["kv_waste"] = stats.kv_waste;
  json["kv_usage_peak"] = stats.kv_usage_peak;
  json["kv_pages"] = stats.total_kv_pages;
  json["kv_bytes_per_token_rank0"] = stats.kv_bytes_per_token;
  json["weight_bytes_rank0"] = stats.weight_bytes;
  // Each step reads the weights once, and the decoding rows what they attend to.
  const double bytes =
      static_cast<double>(stats.weight_bytes) * steps +
      static_cast<double>(stats.kv_tokens_read) * static_cast<double>(stats.kv_bytes_per_token);
  json["read_gb_per_second_rank0"] =
      stats.step_seconds > 0 ? bytes / stats.step_seconds / 1e9 : 0.0;
}

absl::Status CheckLengths(const CommandLine& line) {
  const BenchFlags& bench = line.bench;
  if (bench.input_len_min > bench.input_len || bench.output_len_min > bench.output_len) {
    return absl::InvalidArgumentError(
        "--input-len-min and --output-len-min must not be above --input-len and --output-len");
  }
  return absl::OkStatus();
}

absl::StatusOr<int> BenchThroughput(const CommandLine& line, ResultFile* results, World& world) {
  const BenchFlags& flags = line.bench;
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchEngine> bench,
                   BenchEngine::Start(line.engine, world));
  std::mt19937_64 random(line.engine.seed);
  const auto draw = [&](int64_t low, int64_t high) {
    return low > 0 ? std::uniform_int_distribution<int64_t>(low, high)(random) : high;
  };
  std::vector<Request> requests;
  for (int64_t i = 0; i < flags.num_prompts; ++i) {
    const int64_t input_len = draw(flags.input_len_min, flags.input_len);
    const int64_t output_len = draw(flags.output_len_min, flags.output_len);
    requests.push_back(RandomRequest(input_len, output_len, bench->engine().vocab_size(), random));
  }
  // Touches every weight and page table once.
  const std::vector<Request> warmup = {RandomRequest(std::min<int64_t>(flags.input_len, 8), 2,
                                                     bench->engine().vocab_size(), random)};
  RETURN_IF_ERROR(bench->RunBatch(warmup, nullptr).status());
  bench->engine().ResetStats();
  Progress progress("bench throughput");
  progress.Expect(flags.num_prompts);
  ASSIGN_OR_RETURN(const Run run, bench->RunBatch(requests, &progress));
  progress.Finish();

  const int64_t completed = flags.num_prompts - run.num_failed;
  const int64_t total_tokens = run.num_prompt_tokens + run.num_output_tokens;
  Json json = BenchHead(line, world.self);
  json["num_warmup_requests"] = warmup.size();
  json["elapsed_time"] = run.seconds;
  json["num_requests"] = completed;
  json["failed"] = run.num_failed;
  json["total_num_tokens"] = total_tokens;
  json["total_input_tokens"] = run.num_prompt_tokens;
  json["total_output_tokens"] = run.num_output_tokens;
  json["requests_per_second"] = static_cast<double>(completed) / run.seconds;
  json["tokens_per_second"] = static_cast<double>(total_tokens) / run.seconds;
  json["output_tokens_per_second"] = static_cast<double>(run.num_output_tokens) / run.seconds;
  json["mean_ttft_ms"] = 1e3 * Mean(run.first_token_seconds);
  json["mean_itl_ms"] = 1e3 * Mean(run.token_gaps);
  json["median_itl_ms"] = 1e3 * Percentile(run.token_gaps, 50);
  json["p99_itl_ms"] = 1e3 * Percentile(run.token_gaps, 99);
  AddEngineFigures(bench->engine().stats(), run.seconds, json);
  std::printf("Throughput: %.2f requests/s, %.2f total tokens/s, %.2f output tokens/s\n",
              json["requests_per_second"].get<double>(), json["tokens_per_second"].get<double>(),
              json["output_tokens_per_second"].get<double>());
  std::printf("Total num prompt tokens:  %lld\nTotal num output tokens:  %lld\n",
              static_cast<long long>(run.num_prompt_tokens),
              static_cast<long long>(run.num_output_tokens));
  std::printf("Mean batch %.1f over %lld steps; %lld preemptions; KV waste %.2f %%; %lld failed\n",
              json["mean_batch"].get<double>(), json["steps"].get<long long>(),
              json["preemptions"].get<long long>(), 100 * json["kv_waste"].get<double>(),
              static_cast<long long>(run.num_failed));
  RETURN_IF_ERROR(WriteJson(json, results));
  return run.num_failed == 0 ? kExitOk : kExitFailure;
}

absl::StatusOr<int> BenchLatency(const CommandLine& line, ResultFile* file, World& world) {
  const BenchFlags& flags = line.bench;
  ASSIGN_OR_RETURN(const std::unique_ptr<BenchEngine> bench,
                   BenchEngine::Start(line.engine, world));
  std::mt19937_64 random(line.engine.seed);
  Json results = Json::array();
  int64_t num_failed = 0;
  for (const int64_t batch_size : flags.batch_sizes) {
    std::vector<double> latencies;
    Run all;
    for (int64_t iteration = -flags.num_iters_warmup; iteration < flags.num_iters; ++iteration) {
      std::vector<Request> requests;
      for (int64_t i = 0; i < batch_size; ++i) {
        requests.push_back(
            RandomRequest(flags.input_len, flags.output_len, bench->engine().vocab_size(), random));
      }
      if (iteration == 0) bench->engine().ResetStats();
      ASSIGN_OR_RETURN(const Run run, bench->RunBatch(requests, nullptr));
      num_failed += run.num_failed;
      if (iteration < 0) continue;
      latencies.push_back(run.seconds);
      all.first_token_seconds.insert(all.first_token_seconds.end(), run.first_token_seconds.begin(),
                                     run.first_token_seconds.end());
      all.token_gaps.insert(all.token_gaps.end(), run.token_gaps.begin(), run.token_gaps.end());
    }
    Json json = BenchHead(line, world.self);
    json["batch_size"] = batch_size;
    json["input_len"] = flags.input_len;
    json["output_len"] = flags.output_len;
    json["num_iters_warmup"] = flags.num_iters_warmup;
    json["avg_latency"] = Mean(latencies);
    double squares = 0;
    for (const double latency : latencies) squares += std::pow(latency - Mean(latencies), 2);
    json["std_latency"] = std::sqrt(squares / static_cast<double>(latencies.size()));
    json["latencies"] = latencies;
    for (const int percent : {10, 25, 50, 75, 90, 99}) {
      json["percentiles"][std::to_string(percent)] = Percentile(latencies, percent);
    }
    json["median_ttft_ms"] = 1e3 * Percentile(all.first_token_seconds, 50);
    json["median_itl_ms"] = 1e3 * Percentile(all.token_gaps, 50);
    json["num_itl_samples"] = all.token_gaps.size();
    AddEngineFigures(bench->engine().stats(),
                     std::accumulate(latencies.begin(), latencies.end(), 0.0), json);
    std::printf(
        "Batch %lld: avg latency %.4f s, median %.4f s, TTFT %.1f ms, ITL %.2f ms, "
        "%.1f output tokens/s\n",
        static_cast<long long>(batch_size), Mean(latencies), Percentile(latencies, 50),
        json["median_ttft_ms"].get<double>(), json["median_itl_ms"].get<double>(),
        static_cast<double>(batch_size * flags.output_len) / Percentile(latencies, 50));
    std::fflush(stdout);
    results.push_back(std::move(json));
  }
  RETURN_IF_ERROR(WriteJson(results.size() == 1 ? results.front() : results, file));
  return num_failed == 0 ? kExitOk : kExitFailure;
}

}  // namespace

absl::StatusOr<EngineCommand> PrepareBenchThroughput(const CommandLine& line) {
  RETURN_IF_ERROR(CheckPositive("--input-len", line.bench.input_len));
  RETURN_IF_ERROR(CheckPositive("--output-len", line.bench.output_len));
  RETURN_IF_ERROR(CheckPositive("--num-prompts", line.bench.num_prompts));
  RETURN_IF_ERROR(CheckLengths(line));
  ASSIGN_OR_RETURN(const std::shared_ptr<ResultFile> results, OpenResult(line.bench.output_json));
  return [line, results](World& world) { return BenchThroughput(line, results.get(), world); };
}

absl::StatusOr<EngineCommand> PrepareBenchLatency(const CommandLine& line) {
  RETURN_IF_ERROR(CheckPositive("--input-len", line.bench.input_len));
  RETURN_IF_ERROR(CheckPositive("--output-len", line.bench.output_len));
  RETURN_IF_ERROR(CheckPositive("--num-iters", line.bench.num_iters));
  for (const int64_t batch_size : line.bench.batch_sizes) {
    RETURN_IF_ERROR(CheckPositive("--batch-size", batch_size));
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<ResultFile> file, OpenResult(line.bench.output_json));
  return [line, file](World& world) { return BenchLatency(line, file.get(), world); };
}

}  // namespace heddle
