#include "launch/command_line.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "launch/version.h"
#include "yaml-cpp/yaml.h"

namespace heddle {
namespace {

// Values that CLI11 hands over as text and that are turned into the config's types afterwards.
struct RawFlags {
  std::string load_format = "auto";
  std::string dtype = "auto";
  std::string device = "auto";
  std::string kv_cache_dtype = "auto";
  std::string activation_dtype = "auto";
  std::string score_mode = "prefill";
  std::string num_stripes = "auto";
  std::string stop_token_ids;
  std::string batch_sizes;
  std::string sweep_batch_sizes;
  std::string sweep_input_lens;
  std::string plan_batch_sizes;
  std::string context_lens;
  std::string config;
  std::string max_tokens;
  bool enable_prefix_caching = false;
  bool no_enable_prefix_caching = false;
  bool no_kv_cache = false;
};

// "--tensor_parallel_size=2" and "--tensor-parallel-size=2" are the same flag. Only names are
// touched: a value may hold underscores, and may follow after "=".
std::string NormaliseFlag(const std::string& argument) {
  if (!absl::StartsWith(argument, "--")) return argument;
  std::string normal = argument;
  const size_t end = std::min(normal.find('='), normal.size());
  std::replace(normal.begin(), normal.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
  return normal;
}

std::string FlagName(const std::string& argument) { return argument.substr(0, argument.find('=')); }

std::string CountValidator(std::string& text) {
  const absl::StatusOr<int64_t> count = ParseCount(text);
  if (!count.ok()) return std::string(count.status().message());
  text = std::to_string(*count);
  return "";
}

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// The known flag nearest to `unknown`, or "" if none is near.
std::string NearestFlag(const CLI::App& app, const std::string& unknown) {
  std::string nearest;
  size_t best = 4;  // more than three edits away is another word
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const size_t distance = EditDistance("--" + name, unknown);
      if (distance < best) {
        best = distance;
        nearest = "--" + name;
      }
    }
  }
  return nearest;
}

class Parser {
 public:
  Parser() : app_("Heddle: MPI-native inference of large language models", "heddle") {
    app_.set_version_flag("--version", std::string("heddle ") + kHeddleVersion);
    app_.require_subcommand(1);
    app_.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    AddGenerate();
    AddScore();
    AddBench();
    AddInspect();
    AddPlan();
    doctor_ = app_.add_subcommand("doctor", "Say what this machine has and what to change");
  }

  ParsedCommandLine Parse(const std::vector<std::string>& arguments) {
    ParsedCommandLine result;
    std::vector<std::string> normal;
    normal.reserve(arguments.size());
    for (const std::string& argument : arguments) normal.push_back(NormaliseFlag(argument));
    try {
      const absl::Status merged = MergeConfigFile(normal);
      if (!merged.ok()) return Failure(std::string(merged.message()));
      std::vector<std::string> reversed(normal.rbegin(), normal.rend());
      app_.parse(std::move(reversed));
    } catch (const CLI::Success& success) {  // --help, --version
      std::ostringstream text;
      app_.exit(success, text, text);
      result.exit = {0, text.str()};
      return result;
    } catch (const CLI::ParseError& error) {
      return Failure(Explain(error, normal));
    }
    const absl::Status converted = Convert();
    if (!converted.ok()) return Failure(std::string(converted.message()));
    result.command_line = std::move(line_);
    return result;
  }

 private:
  static ParsedCommandLine Failure(const std::string& why) {
    ParsedCommandLine result;
    result.exit = {2,
                   absl::StrCat("heddle: ", why,
                                "\nRun heddle --help, or heddle COMMAND --help, for the flags.\n")};
    return result;
  }

  CLI::App* Active() {
    CLI::App* active = &app_;
    while (!active->get_subcommands().empty()) active = active->get_subcommands().front();
    return active;
  }

  std::string Explain(const CLI::ParseError& error, const std::vector<std::string>& arguments) {
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
      const CLI::App* active = Active();
      for (const std::string& argument : active->remaining(true)) {
        if (!absl::StartsWith(argument, "-")) continue;
        const std::string nearest = NearestFlag(*active, FlagName(argument));
        return absl::StrCat("unknown flag ", FlagName(argument), " of heddle ", active->get_name(),
                            nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"));
      }
      return absl::StrCat("unexpected argument \"", absl::StrJoin(active->remaining(true), " "),
                          "\"");
    }
    if (arguments.empty()) {
      return "no command given; commands are generate, score, bench throughput, bench latency, "
             "bench batch, inspect, plan and doctor";
    }
    return error.what();
  }

  // Puts the keys of --config FILE in front of the flags that were not given.
  absl::Status MergeConfigFile(std::vector<std::string>& arguments) {
    std::string path;
    std::set<std::string> given;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!absl::StartsWith(arguments[i], "--")) continue;
      const std::string name = FlagName(arguments[i]);
      given.insert(name);
      if (name != "--config") continue;
      if (arguments[i].size() > name.size()) {
        path = arguments[i].substr(name.size() + 1);
      } else if (i + 1 < arguments.size()) {
        path = arguments[i + 1];
      }
    }
    if (path.empty()) return absl::OkStatus();
    try {
      std::ifstream file(path);
      if (!file) {
        return absl::NotFoundError(absl::StrCat("--config: cannot read \"", path, "\""));
      }
      const YAML::Node root = YAML::Load(file);
      if (!root.IsMap() && !root.IsNull()) {
        return absl::InvalidArgumentError(
            absl::StrCat("--config ", path, ": expected a map of flag names to values"));
      }
      for (const auto& entry : root) {
        const std::string flag = NormaliseFlag("--" + entry.first.as<std::string>());
        if (flag == "--config") {
          return absl::InvalidArgumentError(
              absl::StrCat("--config ", path, ": a config file cannot name another one"));
        }
        if (given.count(flag) > 0) continue;
        const auto add = [&](const YAML::Node& value) {
          const std::string text = value.as<std::string>();
          if (text == "true") {
            arguments.push_back(flag);
          } else if (text != "false") {
            arguments.push_back(absl::StrCat(flag, "=", text));
          }
        };
        if (entry.second.IsSequence()) {
          for (const auto& value : entry.second) add(value);
        } else if (entry.second.IsScalar()) {
          add(entry.second);
        } else {
          return absl::InvalidArgumentError(absl::StrCat(
              "--config ", path, ": key \"", flag.substr(2), "\" must be a value or a list"));
        }
      }
    } catch (const YAML::Exception& error) {
      return absl::InvalidArgumentError(absl::StrCat("--config ", path, ": ", error.what()));
    }
    return absl::OkStatus();
  }

  CLI::Option* AddCount(CLI::App* app, const std::string& names, int64_t& target,
                        const std::string& help) {
    return app->add_option(names, target, help)->transform(CLI::Validator(CountValidator, "COUNT"));
  }

  template <typename T>
  CLI::Option* AddOptionalCount(CLI::App* app, const std::string& names, std::optional<T>& target,
                                const std::string& help) {
    return app->add_option(names, target, help)->transform(CLI::Validator(CountValidator, "COUNT"));
  }

  void AddModel(CLI::App* app) {
    EngineConfig& engine = line_.engine;
    app->add_option("--model,-m", engine.model, "Hugging Face directory or .gguf file")->required();
    app->add_option("--load-format", raw_.load_format,
                    "auto|safetensors|gguf|dummy (random weights from a config.json)");
    app->add_option("--dtype", raw_.dtype,
                    "How plain weights are stored: auto|float32|bfloat16|float16");
    app->add_option("--config", raw_.config, "YAML file of defaults; keys are flag names");
    app->add_option("--seed", engine.seed, "Seed of sampling and of dummy weights");
    AddOptionalCount(app, "--tensor-parallel-size,--tp", line_.parallel.tensor_parallel_size,
                     "Ranks that share the model; the world's size by default");
    app->add_option("--decode-context-parallel-size,--dcp", raw_.num_stripes,
                    "Stripes of the cache: auto or a count; for bench batch a list of them");
    AddCount(app, "--expected-context-len", engine.expected_context_len,
             "For the choice of auto; half of --max-model-len by default");
    app->add_flag("--enable-expert-parallel", engine.enable_expert_parallel,
                  "Deal whole experts over ranks");
    app->add_flag("--enable-dp-attention", engine.enable_dp_attention,
                  "MLA: deal whole sequences over ranks, each of which attends with all heads");
    AddCount(app, "--max-model-len", engine.max_model_len,
             "Longest prompt + output; the model's limit by default");
    AddCount(app, "--block-size,--page-size", engine.block_size,
             "Tokens a page of the cache (16, for MLA 64)");
    app->add_option("--kv-cache-dtype", raw_.kv_cache_dtype, "auto|float32|bfloat16|float16");
  }

  void AddEngine(CLI::App* app) {
    EngineConfig& engine = line_.engine;
    AddModel(app);
    app->add_option("--device", raw_.device, "auto|cpu|cuda");
    AddCount(app, "--max-num-seqs", engine.max_num_seqs, "Most sequences in a step (64)");
    AddCount(app, "--max-num-batched-tokens", engine.max_num_batched_tokens,
             "Most tokens in a step (2048)");
    AddCount(app, "--prefill-chunk", engine.prefill_chunk,
             "Most tokens of one prompt in a step; no limit by default");
    AddOptionalCount(app, "--num-kv-pages", engine.num_kv_pages, "Pages a rank, exactly");
    AddOptionalCount(app, "--kv-cache-memory-bytes", engine.kv_cache_memory_bytes,
                     "Bytes of the cache, a rank, at most; by default 4 GiB, or one sequence of "
                     "--max-model-len if that takes more");
    app->add_option("--gpu-memory-utilization", engine.memory_utilization,
                    "Instead: share of a rank's free memory for the cache");
    app->add_option("--activation-dtype", raw_.activation_dtype,
                    "auto (int8 with block-quantised weights) or float32");
    app->add_flag("--enable-prefix-caching", raw_.enable_prefix_caching,
                  "Reuse pages of equal prefixes (default)");
    app->add_flag("--no-enable-prefix-caching", raw_.no_enable_prefix_caching,
                  "Compute every prompt whole");
    app->add_flag("--no-kv-cache", raw_.no_kv_cache, "Recompute everything for each token");
    app->add_option("--num-threads", engine.num_threads,
                    "Threads of a CPU rank; allowed CPUs / ranks by default");
    app->add_option("--distributed-timeout-seconds", line_.parallel.distributed_timeout_seconds,
                    "Longest time without progress before the job is ended (300)");
  }

  void AddGenerate() {
    CLI::App* app = app_.add_subcommand("generate", "Continue prompts; one JSON line each");
    generate_ = app;
    AddEngine(app);
    SamplingParams& sampling = line_.sampling;
    app->add_option("--prompt", line_.generate.prompts, "A prompt; repeatable")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->expected(1)
        ->allow_extra_args(false);
    app->add_option("--prompt-file", line_.generate.prompt_file,
                    "Prompts: .txt, one a line, or .jsonl");
    app->add_option("--output,-o", line_.generate.output, "File for the results, - for stdout");
    app->add_option("--max-tokens", raw_.max_tokens,
                    "Most tokens to generate (16); \"none\": to the context limit");
    AddCount(app, "--min-tokens", sampling.min_tokens,
             "Neither EOS nor a stop ends a sequence before");
    temperature_ = app->add_option("--temperature", sampling.temperature, "0 is greedy");
    top_k_ = app->add_option("--top-k", sampling.top_k, "0 or -1: all");
    top_p_ = app->add_option("--top-p", sampling.top_p, "Nucleus; 0 is greedy");
    min_p_ = app->add_option("--min-p", sampling.min_p, "Least probability relative to the best");
    repetition_penalty_ = app->add_option("--repetition-penalty", sampling.repetition_penalty,
                                          "Over prompt and output");
    app->add_option("--presence-penalty", sampling.presence_penalty, "Over output");
    app->add_option("--frequency-penalty", sampling.frequency_penalty, "Over output");
    app->add_option("--stop", sampling.stop, "A text that ends the output; repeatable")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->expected(1)
        ->allow_extra_args(false);
    app->add_option("--stop-token-ids", raw_.stop_token_ids, "Token ids that end the output: 1,2");
    app->add_flag("--ignore-eos", sampling.ignore_eos, "Go on after the end-of-sequence token");
    app->add_option("--logprobs", sampling.logprobs,
                    "Log-probabilities of the chosen and the N best tokens");
    AddCount(app, "--n", sampling.n, "Sequences a prompt");
  }

  void AddScore() {
    CLI::App* app = app_.add_subcommand("score", "Log-probabilities of given texts");
    score_ = app;
    AddEngine(app);
    app->add_option("--input", line_.score.input,
                    ".jsonl: {\"id\", \"token_ids\" | \"text\"} a line")
        ->required();
    app->add_option("--output,-o", line_.score.output, "File for the results, - for stdout");
    app->add_flag("--logits", line_.score.logits, "Print every position's logits too");
    app->add_option("--score-mode", raw_.score_mode, "prefill, or decode: token by token");
  }

  void AddBench() {
    CLI::App* bench =
        app_.add_subcommand("bench", "Measure throughput, latency or decoding of many batches");
    bench->require_subcommand(1);
    const auto add = [&](const char* name, const char* help) {
      CLI::App* app = bench->add_subcommand(name, help);
      AddEngine(app);
      AddCount(app, "--input-len", line_.bench.input_len, "Prompt tokens of a request (32)");
      AddCount(app, "--output-len", line_.bench.output_len, "Generated tokens of a request (128)");
      app->add_option("--output-json", line_.bench.output_json, "File for the figures");
      return app;
    };
    throughput_ = add("throughput", "Many requests at once");
    AddCount(throughput_, "--input-len-min", line_.bench.input_len_min,
             "Draw prompt lengths from [min, --input-len]");
    AddCount(throughput_, "--output-len-min", line_.bench.output_len_min,
             "Draw output lengths from [min, --output-len]");
    AddCount(throughput_, "--num-prompts", line_.bench.num_prompts, "Requests (64)");
    latency_ = add("latency", "One batch at a time");
    latency_->add_option("--batch-size", raw_.batch_sizes, "Sequences a batch: 1,8,64 (8)");
    AddCount(latency_, "--num-iters", line_.bench.num_iters, "Measured runs (5)");
    AddCount(latency_, "--num-iters-warmup", line_.bench.num_iters_warmup, "Runs before them (1)");
    AddBenchBatch(bench);
  }

  void AddBenchBatch(CLI::App* bench) {
    BenchBatchFlags& flags = line_.bench_batch;
    CLI::App* app = bench->add_subcommand(
        "batch",
        "Decode steps of every batch size, prompt length and placement of the cache, beside what "
        "this machine can do and what the cost model predicts");
    batch_ = app;
    AddEngine(app);
    // By default as many as the largest batch, and a list.
    max_num_seqs_ = app->get_option("--max-num-seqs");
    max_num_seqs_->description("Most sequences in a step; the largest --batch-size by default");
    app->get_option("--decode-context-parallel-size")
        ->description("Stripes of the cache, in turn: 1,2,4; auto may be among them (auto)");
    app->get_option("--max-model-len")
        ->description("Longest prompt + output; what the sweep needs by default");
    app->add_option("--batch-size", raw_.sweep_batch_sizes,
                    "Sequences of a decode step: 1,8,64 (1,8,32)");
    app->add_option("--input-len", raw_.sweep_input_lens,
                    "Tokens of each prompt, cached before the steps: 128,4K (128,1024)");
    AddCount(app, "--num-iters", flags.num_iters, "Measured decode steps of a cell (16)");
    AddCount(app, "--num-iters-warmup", flags.num_iters_warmup, "Steps before them (2)");
    app->add_option("--output-json", flags.output_json,
                    "File for the figures; launch/README.md says what its keys mean");
    app->add_option("--plot", flags.plot,
                    "File for a chart of tokens/s over batch sizes: .svg or .html");
  }

  void AddInspect() {
    CLI::App* app =
        app_.add_subcommand("inspect", "What a checkpoint is and how N ranks would hold it");
    inspect_ = app;
    AddModel(app);
    AddDevice(app);
  }

  void AddPlan() {
    CLI::App* app = app_.add_subcommand(
        "plan", "What N ranks of a device would hold, how fast they would decode at best, and how");
    plan_ = app;
    AddModel(app);
    AddDevice(app);
    app->add_option("--batch-size", raw_.plan_batch_sizes,
                    "Sequences of a decode step (1,8,32,128,512)");
    app->add_option("--context-len", raw_.context_lens,
                    "Tokens cached of each; --expected-context-len by default");
  }

  // What auto is chosen for, and how the answer is printed.
  void AddDevice(CLI::App* app) {
    app->add_option("--device-type", line_.plan.device_type,
                    "H200, H100, A100, A6000, L40S, H20, or cpu: this machine as measured now");
    AddOptionalCount(app, "--max-num-seqs", line_.plan.max_num_seqs, "Most sequences in a step");
    app->add_option("--gpu-memory-utilization", line_.engine.memory_utilization,
                    "Share of the memory for weights and cache (0.92)");
    app->add_option("--format", line_.output_format, "text or json");
  }

  template <typename T>
  absl::Status Choose(const std::string& flag, const std::string& value,
                      const std::vector<std::pair<std::string, T>>& choices, T& target) {
    std::vector<std::string> names;
    for (const auto& [name, choice] : choices) {
      if (value == name) {
        target = choice;
        return absl::OkStatus();
      }
      names.push_back(name);
    }
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": \"", value, "\" is not one of ", absl::StrJoin(names, ", ")));
  }

  template <typename T>
  absl::Status ParseList(const std::string& flag, const std::string& text, std::vector<T>& target) {
    if (text.empty()) return absl::OkStatus();
    target.clear();
    std::stringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
      const absl::StatusOr<int64_t> value = ParseCount(part);
      if (!value.ok()) return Annotate(value.status(), flag);
      if (*value > std::numeric_limits<T>::max()) {
        return absl::InvalidArgumentError(absl::StrCat(flag, ": ", *value, " is too large"));
      }
      target.push_back(static_cast<T>(*value));
    }
    return absl::OkStatus();
  }

  // Nothing for "auto".
  static absl::StatusOr<std::optional<int64_t>> ParseStripes(absl::string_view text) {
    if (text == "auto") return std::optional<int64_t>();
    int64_t count = 0;
    if (absl::SimpleAtoi(text, &count) && count >= 1) return std::optional<int64_t>(count);
    return absl::InvalidArgumentError(
        absl::StrCat("--decode-context-parallel-size: \"", text, "\" is neither auto nor a count"));
  }

  absl::Status Convert() {
    EngineConfig& engine = line_.engine;
    const std::vector<std::pair<std::string, std::optional<DType>>> dtypes = {
        {"auto", std::nullopt},
        {"float32", DType::kFloat32},
        {"bfloat16", DType::kBFloat16},
        {"float16", DType::kFloat16}};
    RETURN_IF_ERROR(Choose<LoadFormat>("--load-format", raw_.load_format,
                                       {{"auto", LoadFormat::kAuto},
                                        {"safetensors", LoadFormat::kSafetensors},
                                        {"gguf", LoadFormat::kGguf},
                                        {"dummy", LoadFormat::kDummy}},
                                       engine.load_format));
    RETURN_IF_ERROR(Choose("--dtype", raw_.dtype, dtypes, engine.dtype));
    RETURN_IF_ERROR(Choose("--kv-cache-dtype", raw_.kv_cache_dtype, dtypes, engine.kv_cache_dtype));
    RETURN_IF_ERROR(Choose<DeviceKind>(
        "--device", raw_.device,
        {{"auto", DeviceKind::kCpu}, {"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}},
        engine.device));
    if (batch_->parsed()) {
      line_.bench_batch.num_stripes.clear();
      for (const absl::string_view part : absl::StrSplit(raw_.num_stripes, ',')) {
        ASSIGN_OR_RETURN(line_.bench_batch.num_stripes.emplace_back(), ParseStripes(part));
      }
    } else {
      ASSIGN_OR_RETURN(engine.num_stripes, ParseStripes(raw_.num_stripes));
    }
    RETURN_IF_ERROR(Choose<bool>("--activation-dtype", raw_.activation_dtype,
                                 {{"auto", true}, {"float32", false}}, engine.int8_activations));
    RETURN_IF_ERROR(Choose<bool>("--score-mode", raw_.score_mode,
                                 {{"prefill", false}, {"decode", true}}, engine.decode_prompts));
    if (raw_.enable_prefix_caching && raw_.no_enable_prefix_caching) {
      return absl::InvalidArgumentError(
          "--enable-prefix-caching and --no-enable-prefix-caching exclude each other");
    }
    engine.enable_prefix_caching = !raw_.no_enable_prefix_caching;
    engine.use_kv_cache = !raw_.no_kv_cache;
    RETURN_IF_ERROR(
        ParseList("--stop-token-ids", raw_.stop_token_ids, line_.sampling.stop_token_ids));
    RETURN_IF_ERROR(ParseList("--batch-size", raw_.batch_sizes, line_.bench.batch_sizes));
    BenchBatchFlags& sweep = line_.bench_batch;
    RETURN_IF_ERROR(ParseList("--batch-size", raw_.sweep_batch_sizes, sweep.batch_sizes));
    RETURN_IF_ERROR(ParseList("--input-len", raw_.sweep_input_lens, sweep.input_lens));
    if (batch_->parsed() && max_num_seqs_->count() == 0) {
      engine.max_num_seqs = *std::max_element(sweep.batch_sizes.begin(), sweep.batch_sizes.end());
    }
    if (raw_.max_tokens == "none") {
      line_.sampling.max_tokens.reset();
    } else if (!raw_.max_tokens.empty()) {
      ASSIGN_OR_RETURN(line_.sampling.max_tokens, ParseCount(raw_.max_tokens));
    }
    RETURN_IF_ERROR(ParseList("--batch-size", raw_.plan_batch_sizes, line_.plan.batch_sizes));
    RETURN_IF_ERROR(ParseList("--context-len", raw_.context_lens, line_.plan.context_lens));
    if (line_.output_format != "text" && line_.output_format != "json") {
      return absl::InvalidArgumentError("--format: expected text or json");
    }
    return ChooseCommand();
  }

  absl::Status ChooseCommand() {
    if (generate_->parsed()) {
      line_.command = Command::kGenerate;
      line_.generate.temperature_given = temperature_->count() > 0;
      line_.generate.top_k_given = top_k_->count() > 0;
      line_.generate.top_p_given = top_p_->count() > 0;
      line_.generate.min_p_given = min_p_->count() > 0;
      line_.generate.repetition_penalty_given = repetition_penalty_->count() > 0;
      if (line_.generate.prompts.empty() == line_.generate.prompt_file.empty()) {
        return absl::InvalidArgumentError(
            "generate needs --prompt TEXT or --prompt-file FILE, one of the two");
      }
    } else if (score_->parsed()) {
      line_.command = Command::kScore;
    } else if (throughput_->parsed()) {
      line_.command = Command::kBenchThroughput;
    } else if (latency_->parsed()) {
      line_.command = Command::kBenchLatency;
    } else if (batch_->parsed()) {
      line_.command = Command::kBenchBatch;
    } else if (inspect_->parsed()) {
      line_.command = Command::kInspect;
    } else if (plan_->parsed()) {
      line_.command = Command::kPlan;
    } else {
      line_.command = Command::kDoctor;
    }
    return absl::OkStatus();
  }

  CLI::App app_;
  CommandLine line_;
  RawFlags raw_;
  CLI::App* generate_ = nullptr;
  CLI::App* score_ = nullptr;
  CLI::App* throughput_ = nullptr;
  CLI::App* latency_ = nullptr;
  CLI::App* batch_ = nullptr;
  CLI::App* inspect_ = nullptr;
  CLI::App* plan_ = nullptr;
  CLI::App* doctor_ = nullptr;
  CLI::Option* max_num_seqs_ = nullptr;  // of bench batch
  CLI::Option* temperature_ = nullptr;
  CLI::Option* top_k_ = nullptr;
  CLI::Option* top_p_ = nullptr;
  CLI::Option* min_p_ = nullptr;
  CLI::Option* repetition_penalty_ = nullptr;
};

}  // namespace

absl::StatusOr<int64_t> ParseCount(const std::string& text) {
  int64_t scale = 1;
  std::string digits = text;
  if (!digits.empty()) {
    switch (digits.back()) {
      case 'k':
        scale = 1'000;
        break;
      case 'K':
        scale = 1'024;
        break;
      case 'm':
        scale = 1'000'000;
        break;
      case 'M':
        scale = 1'048'576;
        break;
      case 'g':
        scale = 1'000'000'000;
        break;
      case 'G':
        scale = 1'073'741'824;
        break;
      default:
        break;
    }
    if (scale != 1) digits.pop_back();
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() || value < 0 ||
      value > std::numeric_limits<int64_t>::max() / scale) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", text, "\" is not a count: expected digits, or digits and k, K, m, M, g or G"));
  }
  return value * scale;
}

ParsedCommandLine ParseCommandLine(const std::vector<std::string>& arguments) {
  return Parser().Parse(arguments);
}

}  // namespace heddle
