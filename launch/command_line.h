// The command line as a value: every flag of every command, parsed and checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/engine_config.h"
#include "runtime/sampling/sampling_params.h"

namespace heddle {

enum class Command {
  kGenerate,
  kScore,
  kBenchThroughput,
  kBenchLatency,
  kBenchBatch,
  kInspect,
  kPlan,
  kDoctor
};

struct ParallelFlags {
  std::optional<int64_t> tensor_parallel_size;  // the world's size if unset
  double distributed_timeout_seconds = 300;
};

struct GenerateFlags {
  std::vector<std::string> prompts;
  std::string prompt_file;   // .txt (one a line) or .jsonl
  std::string output = "-";  // "-" is stdout
  // Which sampling flags were given: those beat the checkpoint's generation_config.json.
  bool temperature_given = false;
  bool top_k_given = false;
  bool top_p_given = false;
  bool min_p_given = false;
  bool repetition_penalty_given = false;
};

struct ScoreFlags {
  std::string input;  // .jsonl
  std::string output = "-";
  bool logits = false;
};

struct BenchFlags {
  int64_t input_len = 32;
  int64_t output_len = 128;
  int64_t input_len_min = 0;  // throughput: uniform in [min, len] if set
  int64_t output_len_min = 0;
  int64_t num_prompts = 64;
  std::vector<int64_t> batch_sizes = {8};
  int64_t num_iters = 5;
  int64_t num_iters_warmup = 1;
  std::string output_json;
};

// Cells of a sweep: every placement, with every prompt length, with every batch.
struct BenchBatchFlags {
  std::vector<int64_t> batch_sizes = {1, 8, 32};
  std::vector<int64_t> input_lens = {128, 1024};
  // Stripes of the cache; nullopt: as the engine chooses.
  std::vector<std::optional<int64_t>> num_stripes = {std::nullopt};
  int64_t num_iters = 16;  // decode steps, as is the next
  int64_t num_iters_warmup = 2;
  std::string output_json;
  std::string plot;  // .svg or .html
};

// What a machine and a load are taken to be, by commands that need no ranks.
struct PlanFlags {
  std::string device_type = "cpu";      // of device_table.h
  std::optional<int64_t> max_num_seqs;  // plan: as many as are of use, if unset
  std::vector<int64_t> batch_sizes = {1, 8, 32, 128, 512};
  std::vector<int64_t> context_lens;  // of a decode step; --expected-context-len if empty
};

struct CommandLine {
  Command command = Command::kGenerate;
  EngineConfig engine;
  ParallelFlags parallel;
  SamplingParams sampling;
  GenerateFlags generate;
  ScoreFlags score;
  BenchFlags bench;
  BenchBatchFlags bench_batch;
  PlanFlags plan;
  std::string output_format = "text";  // of inspect and plan: "text", or "json" for one object
};

// What --help and --version print, or what was wrong: `text` goes to stdout with exit code 0, or to
// stderr with 2.
struct CommandLineExit {
  int exit_code = 0;
  std::string text;
};

struct ParsedCommandLine {
  std::optional<CommandLine> command_line;
  CommandLineExit exit;  // if command_line is empty
};

// vLLM's spelling; `_` and `-` are the same in flag names, counts may end in k (1,000), K (1,024),
// m or M. --config FILE.yaml gives defaults, its keys are flag names; flags beat it. Reads no
// environment.
ParsedCommandLine ParseCommandLine(const std::vector<std::string>& arguments);

// "1k" is 1000, "1K" 1024, "2m", "2M" alike; an error names what is legal.
absl::StatusOr<int64_t> ParseCount(const std::string& text);

}  // namespace heddle
