#include "runtime/auto_placement.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/backend_registry.h"
#include "kernels/base/ceil_div.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/machine_speed.h"
#include "parallel/link_speed.h"
#include "parallel/startup_check.h"
#include "runtime/agreement.h"
#include "runtime/cost_model.h"
#include "runtime/memory_share.h"

namespace heddle {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// Of the ranks of a node together: several times its last cache; and at least several times the
// cache of one core.
constexpr int64_t kMemoryOfNode = 128 * kMiB;
constexpr int64_t kLeastMemory = 16 * kMiB;
// About 50 ms each where a rank has a core of its own.
constexpr int kMultiplyAddCalls = 10;
constexpr int kReadCalls = 5;
// A world has room for a dozen groups; 36 ranks are the first with more than six that divide them.
constexpr int kMostExchanges = 6;

// Collective: the rate that this rank has while all others are as busy, the least of all. Ranks
// that share a core may run one after the other, so the time counts until all are done.
absl::StatusOr<double> SharedRate(int calls, World& world, Stream& stream,
                                  absl::FunctionRef<double(CpuThreadPool&)> measure) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  double work = 0;
  const auto run = [&](int count) {
    CpuStream::From(stream).Enqueue([&, count](CpuThreadPool& pool) {
      for (int i = 0; i < count; ++i) {
        const Clock::time_point start = Clock::now();
        const double rate = measure(pool);
        work += rate * seconds_since(start);
      }
      return absl::OkStatus();
    });
    return stream.Synchronize();
  };
  RETURN_IF_ERROR(run(1));  // wakes what slept
  RETURN_IF_ERROR(world.control->Barrier());
  work = 0;
  const Clock::time_point start = Clock::now();
  RETURN_IF_ERROR(run(calls));
  RETURN_IF_ERROR(world.control->Barrier());
  ASSIGN_OR_RETURN(const int64_t least,
                   world.control->AllReduceMin(std::llround(work / seconds_since(start))));
  return static_cast<double>(std::max<int64_t>(least, 1));
}

// Collective: every number of stripes with which all ranks have room for a page, and what their
// caches then hold.
absl::StatusOr<std::vector<StripeOption>> OptionsOfJob(const EngineConfig& config,
                                                       const EngineLimits& limits,
                                                       const ModelSpec& spec,
                                                       const WeightSource& weights,
                                                       ShardLayoutOptions layout, World& world) {
  // 0 if this rank could not run so.
  const auto pages_here = [&]() -> int64_t {
    const absl::StatusOr<ShardLayout> ranks = BuildShardLayout(spec, weights, layout);
    if (!ranks.ok()) return 0;
    return NumPagesOf(config, limits, ranks->ranks[world.self.rank], ranks->grid,
                      layout.memory_bytes.value_or(0))
        .value_or(0);
  };
  std::vector<StripeOption> options;
  for (int stripes = 1; stripes <= layout.num_ranks; ++stripes) {
    if (layout.num_ranks % stripes != 0) continue;
    layout.num_stripes = stripes;
    ASSIGN_OR_RETURN(const int64_t pages, world.control->AllReduceMin(pages_here()));
    if (pages == 0) continue;
    options.push_back(
        {.num_stripes = stripes, .capacity_tokens = pages * limits.page_size * stripes});
  }
  return options;
}

// Collective: what rank 0 makes of the figures of all ranks, for ranks of different machines might
// not round alike. `choose` runs on every rank, and may measure more.
absl::StatusOr<int> MeasureAndChoose(
    const EngineConfig& config, int num_threads, World& world,
    absl::FunctionRef<absl::StatusOr<int>(const DeviceFigures&, Backend&, Stream&)> choose) {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Stream> stream;
  const auto prepare = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(backend,
                     CreateBackend({.device = config.device, .cpu = {.num_threads = num_threads}}));
    ASSIGN_OR_RETURN(stream, backend->CreateStream());
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(AgreeOnStatus(prepare(), *world.control));

  const auto measure = [&]() -> absl::StatusOr<int> {
    // A broken link shows here, where there is a deadline.
    RETURN_IF_ERROR(CheckAllReduce(world, *backend, *stream));
    ASSIGN_OR_RETURN(const DeviceFigures device, MeasureRanks(world, *backend, *stream));
    ASSIGN_OR_RETURN(int chosen, choose(device, *backend, *stream));
    std::string message = absl::StrCat(chosen);
    RETURN_IF_ERROR(world.control->Broadcast(message));
    if (absl::SimpleAtoi(message, &chosen)) return chosen;
    return absl::InternalError(absl::StrCat("rank 0's choice is garbled: ", message));
  };
  const absl::StatusOr<int> chosen = measure();
  if (!chosen.ok()) world.control->Abort(chosen.status());
  return chosen;
}

std::string SpeedText(const CollectiveSpeed& speed) {
  return absl::StrFormat("%.3g us + %.3g GB/s", speed.latency_seconds * 1e6,
                         speed.bytes_per_second / 1e9);
}

}  // namespace

absl::StatusOr<int64_t> NumPagesOf(const EngineConfig& config, const EngineLimits& limits,
                                   const RankLayout& rank, const KvGrid& grid,
                                   int64_t free_memory) {
  const CacheBudget budget = {.num_pages = config.num_kv_pages,
                              .memory_bytes = config.kv_cache_memory_bytes,
                              .utilization = config.memory_utilization};
  CacheNeed need;
  need.bytes_per_page = rank.kv.bytes_per_page();
  const int64_t pages = CeilDiv(limits.max_model_len + 1, limits.page_size);
  // Of whole sequences all may be pulled to one stripe, by a prefix that they share.
  need.longest_sequence = grid.data_parallel() ? pages : CeilDiv(pages, grid.num_stripes());
  need.whole_batch = limits.max_num_seqs * need.longest_sequence;
  need.free_memory = std::max<int64_t>(free_memory - rank.weight_bytes, 0);
  return ChooseNumPages(budget, need);
}

absl::StatusOr<DeviceFigures> MeasureRanks(World& world, Backend& backend, Stream& stream) {
  const int64_t bytes = std::max(kMemoryOfNode / world.self.node_size / kMiB * kMiB, kLeastMemory);
  ASSIGN_OR_RETURN(const DeviceBuffer memory, backend.Allocate(bytes));
  RETURN_IF_ERROR(backend.MemsetAsync(memory.data(), 1, bytes, stream));  // gives it pages
  ASSIGN_OR_RETURN(const double flops,
                   SharedRate(kMultiplyAddCalls, world, stream, [](CpuThreadPool& pool) {
                     return MultiplyAddRate(pool, pool.num_threads());
                   }));
  ASSIGN_OR_RETURN(const double read_bytes_per_second,
                   SharedRate(kReadCalls, world, stream, [&](CpuThreadPool& pool) {
                     return ReadRate(pool, {memory.as<std::byte>(), static_cast<size_t>(bytes)});
                   }));
  DeviceFigures figures = CpuFigures(flops, read_bytes_per_second);
  figures.source = "measured by all ranks together";
  if (world.self.size == 1) return figures;
  ASSIGN_OR_RETURN(figures.all_reduce, MeasureAllReduce(world, backend, stream));
  // An all-reduce is a reduce-scatter and an all-gather, and waits for as many ranks as they do.
  figures.reduce_scatter = figures.all_gather = figures.all_to_all = figures.all_reduce;
  return figures;
}

absl::Status MeasureExchanges(std::span<StripeOption> options, World& world, Backend& backend,
                              Stream& stream) {
  std::optional<CollectiveSpeed> last;
  int num_measured = 0;
  for (size_t i = options.size(); i-- > 0;) {
    StripeOption& option = options[i];
    if (option.num_stripes == 1) continue;
    if (num_measured < kMostExchanges) {
      ASSIGN_OR_RETURN(last, MeasureExchange(world, option.num_stripes, backend, stream));
      ++num_measured;
    }
    option.exchange = last;
  }
  return absl::OkStatus();
}

std::string FiguresText(const DeviceFigures& device, std::span<const StripeOption> options) {
  std::string text = absl::StrFormat(
      "a rank reads %.3g GB/s and computes %.3g GFLOP/s, an all-reduce takes %s",
      device.read_bytes_per_second / 1e9, device.flops / 1e9, SpeedText(device.all_reduce));
  for (const StripeOption& option : options) {
    if (!option.exchange.has_value()) continue;
    absl::StrAppend(&text, ", an exchange between ", option.num_stripes, " ",
                    SpeedText(*option.exchange));
  }
  return text;
}

absl::StatusOr<int> ChooseStripesOfJob(const EngineConfig& config, const EngineLimits& limits,
                                       const ModelSpec& spec, const WeightSource& weights,
                                       const ShardLayoutOptions& layout, int num_threads,
                                       World& world) {
  if (world.self.size == 1 || !config.use_kv_cache) return 1;
  ASSIGN_OR_RETURN(std::vector<StripeOption> options,
                   OptionsOfJob(config, limits, spec, weights, layout, world));
  if (options.empty()) return 1;
  if (options.size() == 1) return options.front().num_stripes;

  const absl::StatusOr<int64_t> context =
      ExpectedContext(config.expected_context_len, limits.max_model_len);
  RETURN_IF_ERROR(AgreeOnStatus(context.status(), *world.control));
  const ExpectedLoad load = {.max_num_seqs = limits.max_num_seqs, .context_len = *context};
  return MeasureAndChoose(
      config, num_threads, world,
      [&](const DeviceFigures& device, Backend& backend, Stream& stream) -> absl::StatusOr<int> {
        RETURN_IF_ERROR(MeasureExchanges(options, world, backend, stream));
        const StripeChoice choice =
            ChooseStripes(CostsOf(spec, weights, layout.kv_cache_dtype, layout.weight_dtype),
                          device, world.self.size, options, load);
        if (world.self.rank == 0) {
          LOG(INFO) << "--decode-context-parallel-size auto is " << choice.why
                    << "; measured: " << FiguresText(device, options);
        }
        return choice.num_stripes;
      });
}

absl::StatusOr<bool> ChooseExchangeOfJob(const EngineConfig& config, const EngineLimits& limits,
                                         const ModelSpec& spec, const WeightSource& weights,
                                         const ShardLayoutOptions& layout, int num_threads,
                                         World& world) {
  if (!CanExchangeExperts(spec, layout)) return false;
  if (config.exchange_experts.has_value()) return *config.exchange_experts;
  return MeasureAndChoose(
      config, num_threads, world,
      [&](const DeviceFigures& device, Backend&, Stream&) -> absl::StatusOr<int> {
        const bool exchanges =
            ExchangesExperts(CostsOf(spec, weights, layout.kv_cache_dtype, layout.weight_dtype),
                             device, world.self.size, limits.max_num_seqs);
        if (world.self.rank == 0) {
          LOG(INFO) << "tokens "
                    << (exchanges ? "travel to their experts" : "are gathered on every rank")
                    << ": predicted to be faster for " << limits.max_num_seqs
                    << " sequences; measured: " << FiguresText(device, {});
        }
        return exchanges ? 1 : 0;
      });
}

}  // namespace heddle
