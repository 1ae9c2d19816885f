// Whether --decode-context-parallel-size auto picks the placement that measures fastest:
//   mpirun -n 4 stripe_check MODEL RANKS_PER_NODE BATCHxCONTEXT...
// MODEL holds a config.json; weights are made up. Above 0 RANKS_PER_NODE, groups of so many ranks
// pretend to be nodes and talk by MPI. stripe_check.sh says which runs there are.
//
// Every cell is a decode step of BATCH sequences of CONTEXT tokens: workers, one for each number of
// stripes, are given plans in which those tokens are already cached, and take turns. Prints the
// predicted and the median measured time of each, and counts the cells in which the chosen one is
// within 5 % of the fastest.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/ceil_div.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/world_mpi.h"
#include "runtime/auto_placement.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cost_model.h"
#include "runtime/cpu_share.h"
#include "runtime/stripe_choice.h"
#include "runtime/worker.h"

namespace heddle {
namespace {

constexpr double kSecondsPerCell = 1.5;
constexpr int kMostRounds = 25;
constexpr double kSame = 1.05;

// A worker of some number of stripes, and the sequences it is given.
class Candidate {
 public:
  static absl::StatusOr<Candidate> Create(EngineConfig config, int num_stripes, int64_t most_tokens,
                                          Checkpoint& checkpoint, World& world) {
    config.num_stripes = num_stripes;
    config.num_kv_pages =
        CeilDiv(most_tokens, config.block_size * num_stripes) + config.max_num_seqs;
    Candidate candidate(num_stripes, config.block_size);
    ASSIGN_OR_RETURN(candidate.worker_,
                     Worker::Create(config, checkpoint, checkpoint.spec.vocab_size, world));
    return candidate;
  }

  // Takes `load` in place of what was there, with pages for the steps to come.
  void Admit(const ExpectedLoad& load) {
    context_len_ = load.context_len;
    next_ = {};
    for (int32_t slot = 0; slot < batch_; ++slot) next_.released_slots.push_back(slot);
    batch_ = static_cast<int32_t>(load.max_num_seqs);
    std::vector<int32_t> used(num_stripes_, 0);
    for (int32_t slot = 0; slot < batch_; ++slot) {
      SamplingParams params;
      params.temperature = 0;
      std::vector<int32_t> tokens(context_len_);
      for (int64_t i = 0; i < context_len_; ++i) tokens[i] = static_cast<int32_t>(i % 97 + slot);
      next_.admissions.push_back({.batch_slot = slot,
                                  .params = params,
                                  .seed = 0,
                                  .prompt_length = 1,
                                  .token_ids = std::move(tokens)});
      PageTableDelta delta = {.batch_slot = slot, .reset = true};
      const int64_t pages = CeilDiv(context_len_ + kMostRounds + 2, page_size_);
      for (int64_t page = 0; page < pages; ++page) {
        const auto stripe = static_cast<int32_t>((page + slot) % num_stripes_);
        delta.appended.push_back({.stripe = stripe, .slot = used[stripe]++});
      }
      next_.page_deltas.push_back(std::move(delta));
    }
  }

  // Seconds of a step, from when all ranks are there.
  absl::StatusOr<double> Step(World& world) {
    for (int32_t slot = 0; slot < batch_; ++slot) {
      next_.rows.push_back({.batch_slot = slot,
                            .query_length = 1,
                            .first_position = static_cast<int32_t>(context_len_ - 1),
                            .sample = true});
    }
    next_.epoch = ++epoch_;
    ++context_len_;
    RETURN_IF_ERROR(world.control->Barrier());
    const auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(worker_->Execute(next_).status());
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    next_ = {};
    return seconds;
  }

 private:
  Candidate(int num_stripes, int64_t page_size)
      : num_stripes_(num_stripes), page_size_(page_size) {}

  int num_stripes_;
  int64_t page_size_;
  std::unique_ptr<Worker> worker_;
  StepPlan next_;
  uint64_t epoch_ = 0;
  int32_t batch_ = 0;
  int64_t context_len_ = 0;
};

// The median time of each candidate, from rank 0's clock.
absl::StatusOr<std::vector<double>> Measure(std::vector<Candidate>& candidates,
                                            const ExpectedLoad& load, World& world) {
  double longest = 0;
  for (Candidate& one : candidates) {
    one.Admit(load);
    RETURN_IF_ERROR(one.Step(world).status());
    ASSIGN_OR_RETURN(const double seconds, one.Step(world));
    longest = std::max(longest, seconds);
  }
  std::string rounds = absl::StrCat(std::clamp(
      static_cast<int>(kSecondsPerCell / longest / static_cast<double>(candidates.size())), 3,
      kMostRounds - 2));
  RETURN_IF_ERROR(world.control->Broadcast(rounds));
  std::vector<std::vector<double>> times(candidates.size());
  for (int round = 0; round < std::stoi(rounds); ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      ASSIGN_OR_RETURN(times[i].emplace_back(), candidates[i].Step(world));
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& one : times) {
    std::nth_element(one.begin(), one.begin() + one.size() / 2, one.end());
    medians.push_back(one[one.size() / 2]);
  }
  return medians;
}

struct Job {
  EngineConfig config;
  std::vector<ExpectedLoad> cells;
};

absl::Status Run(const Job& job, World& world) {
  ASSIGN_OR_RETURN(Checkpoint checkpoint, OpenCheckpoint(job.config.model, LoadFormat::kDummy, 0));
  ASSIGN_OR_RETURN(const int num_threads, AgreeOnThreads(world));
  const auto backend = CreateCpuBackend({.num_threads = num_threads});
  ASSIGN_OR_RETURN(const auto stream, backend->CreateStream());
  int64_t most_tokens = 0;
  for (const ExpectedLoad& cell : job.cells) {
    const int64_t padded = cell.context_len + kMostRounds + 2 + job.config.block_size;
    most_tokens = std::max(most_tokens, cell.max_num_seqs * padded);
  }
  std::vector<StripeOption> options;
  for (int stripes = 1; stripes <= world.self.size; ++stripes) {
    // Memory is not the limit here.
    if (world.self.size % stripes == 0) options.push_back({stripes, int64_t{1} << 60});
  }
  ASSIGN_OR_RETURN(const DeviceFigures device, MeasureRanks(world, *backend, *stream));
  RETURN_IF_ERROR(MeasureExchanges(options, world, *backend, *stream));
  const ModelCosts model = CostsOf(checkpoint.spec, *checkpoint.weights, DType::kFloat32);
  std::vector<Candidate> candidates;
  for (const StripeOption& option : options) {
    ASSIGN_OR_RETURN(Candidate candidate, Candidate::Create(job.config, option.num_stripes,
                                                            most_tokens, checkpoint, world));
    candidates.push_back(std::move(candidate));
  }
  const bool prints = world.self.rank == 0;
  if (prints) std::printf("%s\n", FiguresText(device, options).c_str());
  int agreed = 0;
  for (const ExpectedLoad& cell : job.cells) {
    const StripeChoice choice = ChooseStripes(model, device, world.self.size, options, cell);
    ASSIGN_OR_RETURN(const std::vector<double> measured, Measure(candidates, cell, world));
    if (!prints) continue;
    const double fastest = *std::min_element(measured.begin(), measured.end());
    std::string line = absl::StrCat(cell.max_num_seqs, " x ", cell.context_len, ":");
    bool agrees = false;
    for (size_t i = 0; i < options.size(); ++i) {
      const StepTime time = PredictOption(model, device, world.self.size, options[i], cell);
      const bool is_chosen = options[i].num_stripes == choice.num_stripes;
      if (is_chosen) agrees = measured[i] <= kSame * fastest;
      char text[200];
      std::snprintf(
          text, sizeof(text), "  [%d]%s predicted %.2f (%.2f + %.2f + %.2f) measured %.2f ms",
          options[i].num_stripes, is_chosen ? "*" : "", time.total() * 1e3, time.linear * 1e3,
          time.attention * 1e3, time.communication * 1e3, measured[i] * 1e3);
      line += text;
    }
    agreed += agrees;
    std::printf("%s  %s\n", line.c_str(), agrees ? "ok" : "NOT");
    std::fflush(stdout);
  }
  if (prints)
    std::printf("chosen within 5 %% of the fastest: %d of %zu\n", agreed, job.cells.size());
  return world.control->Barrier();
}

absl::Status Main(int argc, char** argv) {
  if (argc < 4) return absl::InvalidArgumentError("MODEL RANKS_PER_NODE BATCHxCONTEXT...");
  SetMinLogSeverity(LogSeverity::kWarning);
  Job job;
  job.config.model = argv[1];
  job.config.load_format = LoadFormat::kDummy;
  job.config.block_size = 64;
  for (int i = 3; i < argc; ++i) {
    char* rest = nullptr;
    const int64_t batch = std::strtoll(argv[i], &rest, 10);
    const int64_t context = *rest == 'x' ? std::strtoll(rest + 1, nullptr, 10) : 0;
    if (batch < 1 || context < 1) {
      return absl::InvalidArgumentError(absl::StrCat(argv[i], " is no BATCHxCONTEXT"));
    }
    job.cells.push_back({batch, context});
    job.config.max_num_seqs = std::max(job.config.max_num_seqs, batch);
    job.config.max_model_len = std::max(job.config.max_model_len, context + kMostRounds + 2);
  }
  ASSIGN_OR_RETURN(World world, JoinMpiWorld({.ranks_per_node = std::atoi(argv[2])}));
  const absl::Status status = Run(job, world);
  if (!status.ok()) world.control->Abort(status);
  return status;
}

}  // namespace
}  // namespace heddle

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  const absl::Status status = heddle::Main(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  MPI_Finalize();
  return status.ok() ? 0 : 1;
}
