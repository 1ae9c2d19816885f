// Whole steps of the engine: against the memory's bandwidth, on ranks against threads, and grouped
// queries against a KV head for each.
//
// A decode step at batch 1 must read every weight once and the keys and values of its context; at
// this size nothing else counts, so its floor is those bytes at the bandwidth of this very run.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/shard_layout.h"
#include "tests/bench/machine.h"
#include "tests/support/engine_world.h"

namespace heddle {
namespace {

constexpr int kRounds = 9;
constexpr int kThreads = 2;

// A model of SmolLM2-135M's depth and vocabulary. The config is written to a directory of its own.
std::string WriteModel(const std::string& name, int hidden, int intermediate, int query_heads,
                       int kv_heads) {
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / "heddle_bench" / name;
  std::filesystem::create_directories(directory);
  std::ofstream(directory / "config.json") << absl::StrCat(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu",)",
      R"("hidden_size":)", hidden, R"(,"intermediate_size":)", intermediate,
      R"(,"num_hidden_layers":30,"num_attention_heads":)", query_heads,
      R"(,"num_key_value_heads":)", kv_heads,
      R"(,"head_dim":64,"vocab_size":49152,"max_position_embeddings":4096,)",
      R"("rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":true,)",
      R"("torch_dtype":"bfloat16","bos_token_id":0,"eos_token_id":1})");
  return directory;
}

EngineConfig Config(const std::string& model, int num_threads) {
  EngineConfig config;
  config.model = model;
  config.load_format = LoadFormat::kDummy;
  config.max_model_len = 2048;
  config.max_num_seqs = 16;
  config.num_threads = num_threads;
  config.num_stripes = 1;
  config.enable_prefix_caching = false;
  return config;
}

struct Figures {
  double seconds_per_step = 0;
  double bytes_per_step = 0;  // of rank 0: weights, keys and values
};

// Decodes `batch` sequences side by side and counts the steps.
absl::StatusOr<Figures> Decode(Engine& engine, int batch, int64_t prompt_length,
                               int64_t output_length) {
  engine.ResetStats();
  for (int i = 0; i < batch; ++i) {
    std::vector<int32_t> prompt(prompt_length, 100 + i);
    Request request = GreedyRequest(std::move(prompt), output_length);
    request.id = std::to_string(i);
    RETURN_IF_ERROR(engine.Submit(std::move(request)));
  }
  RETURN_IF_ERROR(engine.Drain());
  const EngineStats stats = engine.stats();
  const auto steps = static_cast<double>(stats.num_steps);
  return Figures{stats.step_seconds / steps, static_cast<double>(stats.weight_bytes) +
                                                 static_cast<double>(stats.kv_tokens_read) *
                                                     static_cast<double>(stats.kv_bytes_per_token) /
                                                     steps};
}

using EngineBody = std::function<absl::Status(Engine& engine)>;

absl::Status WithRanks(const EngineConfig& config, int num_ranks, const EngineBody& body) {
  return WithEngine(
      config, num_ranks, [](RequestOutput) {},
      [&](Engine& engine) -> absl::Status {
        RETURN_IF_ERROR(Decode(engine, 1, 1, 8).status());  // touch everything once
        return body(engine);
      });
}

// The median over the rounds of what `first` takes over what `second` takes, taken in turn.
absl::StatusOr<double> TimesLonger(Engine& first, Engine& second, int batch, int64_t prompt_length,
                                   int64_t output_length, int rounds) {
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    ASSIGN_OR_RETURN(const Figures one, Decode(first, batch, prompt_length, output_length));
    ASSIGN_OR_RETURN(const Figures two, Decode(second, batch, prompt_length, output_length));
    ratios.push_back(one.seconds_per_step / two.seconds_per_step);
  }
  std::nth_element(ratios.begin(), ratios.begin() + rounds / 2, ratios.end());
  return ratios[rounds / 2];
}

absl::Status BenchDecodeStep(const std::string& model, Machine& machine) {
  return WithRanks(Config(model, kThreads), 1, [&](Engine& engine) -> absl::Status {
    for (const int batch : {1, 8}) {
      std::vector<double> shares;
      for (int round = 0; round < kRounds; ++round) {
        const double bandwidth = machine.ReadBytesPerSecond();
        ASSIGN_OR_RETURN(const Figures figures, Decode(engine, batch, 1, 24));
        shares.push_back(figures.bytes_per_step / figures.seconds_per_step / bandwidth);
      }
      std::nth_element(shares.begin(), shares.begin() + kRounds / 2, shares.end());
      PrintRatio(absl::StrCat("decode_step_bfloat16_batch_", batch, "_of_bandwidth"),
                 shares[kRounds / 2], batch == 1 ? 0.70 : 0.0);
    }
    return absl::OkStatus();
  });
}

// How fast the slowest of two ranks could be, against one rank, if only bytes of weights counted.
absl::StatusOr<double> IdealShare(const std::string& model) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(model, LoadFormat::kDummy, 0));
  ShardLayoutOptions options;
  ASSIGN_OR_RETURN(const ShardLayout one,
                   BuildShardLayout(checkpoint.spec, *checkpoint.weights, options));
  options.num_ranks = 2;
  ASSIGN_OR_RETURN(const ShardLayout two,
                   BuildShardLayout(checkpoint.spec, *checkpoint.weights, options));
  return static_cast<double>(one.MaxWeightBytes()) / 2 / static_cast<double>(two.MaxWeightBytes());
}

absl::Status BenchRanks(const std::string& name, const std::string& model, double asked) {
  ASSIGN_OR_RETURN(const double ideal, IdealShare(model));
  PrintRatio(absl::StrCat("two_ranks_", name, "_ideal_share"), ideal, 0.0);
  return WithRanks(Config(model, kThreads), 1, [&](Engine& one) {
    return WithRanks(Config(model, 1), 2, [&](Engine& two) -> absl::Status {
      for (const int batch : {1, 8}) {
        ASSIGN_OR_RETURN(const double ratio, TimesLonger(one, two, batch, 1, 24, kRounds));
        PrintRatio(absl::StrCat("two_ranks_", name, "_batch_", batch, "_of_one_with_two_threads"),
                   ratio, asked);
      }
      return absl::OkStatus();
    });
  });
}

// What smaller keys and values are worth: a KV head for each of 8 query heads against one for 4.
absl::Status BenchGroups(const std::string& grouped, const std::string& mha) {
  const auto cached = [](const std::string& model) {
    EngineConfig config = Config(model, kThreads);
    config.enable_prefix_caching = true;  // the contexts are computed once, and then decoded on
    return config;
  };
  return WithRanks(cached(mha), 1, [&](Engine& every_head) {
    return WithRanks(cached(grouped), 1, [&](Engine& groups) -> absl::Status {
      constexpr int kBatch = 16;
      constexpr int64_t kContext = 513;
      RETURN_IF_ERROR(Decode(every_head, kBatch, kContext, 1).status());
      RETURN_IF_ERROR(Decode(groups, kBatch, kContext, 1).status());
      ASSIGN_OR_RETURN(const double ratio,
                       TimesLonger(every_head, groups, kBatch, kContext, 16, 5));
      PrintRatio("gqa_gain_over_mha_batch_16_context_512", ratio, 0.0);
      return absl::OkStatus();
    });
  });
}

absl::Status Main() {
  SetMinLogSeverity(LogSeverity::kWarning);
  const std::string even = WriteModel("even", 512, 1536, 8, 4);
  const std::string smollm2 = WriteModel("smollm2", 576, 1536, 9, 3);
  const std::string grouped = WriteModel("grouped", 512, 1536, 8, 2);
  const std::string mha = WriteModel("mha", 512, 1536, 8, 8);
  CpuBackendOptions options;
  options.num_threads = kThreads;
  const std::unique_ptr<Backend> backend = CreateCpuBackend(options);
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->CreateStream());
  Machine machine(*backend, *stream);
  machine.Wake();
  RETURN_IF_ERROR(BenchDecodeStep(smollm2, machine));
  RETURN_IF_ERROR(BenchRanks("even", even, 0.9));
  RETURN_IF_ERROR(BenchRanks("smollm2", smollm2, 0.0));
  return BenchGroups(grouped, mha);
}

}  // namespace
}  // namespace heddle

int main() {
  const absl::Status status = heddle::Main();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
