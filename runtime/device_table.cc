#include "runtime/device_table.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/cpu/machine_speed.h"
#include "kernels/cpu/thread_pool.h"
#include "runtime/memory_share.h"

namespace heddle {
namespace {

constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;
constexpr double kMicro = 1e-6;

// Memory, bandwidth and dense peaks are of NVIDIA's data sheets (half of what they print "with
// sparsity"), links one way (half of what they print). Latencies are measured ones:
//  - NVLink, all-reduce: MSCCL++'s targets for 8 GPUs and 24 to 72 KB, test/deploy/perf_ndmv5
//    (H100: 6.2 to 6.9 us) and perf_ndmv4 (A100: 7.2 to 8.3 us) of microsoft/mscclpp. Other
//    collectives, which few tune, are taken as 10 us.
//  - PCIe, all-reduce: 54 us for 8 bytes on 8 RTX 3090 (NVIDIA/nccl, issue 1439). Others take half
//    the steps of its ring.
struct Fabric {
  double bytes_per_second;
  double all_reduce_latency;
  double other_latency;
};
constexpr Fabric kNvLink4 = {450 * kGiga, 7 * kMicro, 10 * kMicro};
constexpr Fabric kNvLink3 = {300 * kGiga, 8 * kMicro, 10 * kMicro};
constexpr Fabric kPcie4 = {32 * kGiga, 54 * kMicro, 27 * kMicro};

struct Gpu {
  const char* name;
  double memory_bytes;
  double read_bytes_per_second;
  double flops;
  double fp8_flops;
  Fabric fabric;
  const char* source;
};
constexpr Gpu kGpus[] = {
    {"H200", 141 * kGiga, 4.8 * kTera, 989 * kTera, 1979 * kTera, kNvLink4, "H200 SXM data sheet"},
    {"H100", 80 * kGiga, 3.35 * kTera, 989 * kTera, 1979 * kTera, kNvLink4, "H100 SXM data sheet"},
    {"A100", 80 * kGiga, 2.039 * kTera, 312 * kTera, 0, kNvLink3, "A100 SXM 80 GB data sheet"},
    {"A6000", 48 * kGiga, 768 * kGiga, 154.8 * kTera, 0, kPcie4, "RTX A6000 data sheet"},
    {"L40S", 48 * kGiga, 864 * kGiga, 362.05 * kTera, 733 * kTera, kPcie4, "L40S data sheet"},
    {"H20", 96 * kGiga, 4.0 * kTera, 148 * kTera, 296 * kTera, kNvLink4,
     "as FlashMLA's users report it"},
};

DeviceFigures FiguresOf(const Gpu& gpu) {
  const CollectiveSpeed other = {gpu.fabric.other_latency, gpu.fabric.bytes_per_second};
  return {.name = gpu.name,
          .memory_bytes = gpu.memory_bytes,
          .read_bytes_per_second = gpu.read_bytes_per_second,
          .flops = gpu.flops,
          .fp8_flops = gpu.fp8_flops,
          .attained_flops_share = 1,
          .overlaps_reads = true,
          .activation_bytes = 2,
          .all_reduce = {gpu.fabric.all_reduce_latency, gpu.fabric.bytes_per_second},
          .all_gather = other,
          .reduce_scatter = other,
          .all_to_all = other,
          .source = gpu.source};
}

// Through a node's shared memory, by tests/bench/comm_bench: 0.2 us and 6.3 GB/s between two ranks
// of an AMD EPYC (Zen 4) that arrive together. Those of a step do not, hence ten times the latency.
constexpr CollectiveSpeed kSharedMemory = {2 * kMicro, 6 * kGiga};

// By tests/bench/stripe_check on an Intel Xeon at 2.8 GHz with AVX-512: linear layers at batch 64
// reach 0.44 of the multiply-adds that MultiplyAddRate does, MLA over 8 and 16 heads 0.4 to 0.5 if
// the time to read latents comes on top.
constexpr double kCpuAttainedFlopsShare = 0.45;

DeviceFigures MeasureCpu(int num_ranks) {
  CpuThreadPool pool(NumAllowedCpus());
  const MachineSpeed speed = MeasureMachine(pool);
  DeviceFigures figures =
      CpuFigures(speed.flops / num_ranks, speed.read_bytes_per_second / num_ranks);
  figures.memory_bytes = static_cast<double>(FreeMemory()) / num_ranks;
  figures.source = absl::StrCat("measured now, an even share of ", pool.num_threads(),
                                " CPUs and of the free memory");
  return figures;
}

}  // namespace

DeviceFigures CpuFigures(double flops, double read_bytes_per_second) {
  return {.name = "cpu",
          .memory_bytes = 0,
          .read_bytes_per_second = read_bytes_per_second,
          .flops = flops,
          .fp8_flops = 0,
          .attained_flops_share = kCpuAttainedFlopsShare,
          .overlaps_reads = false,
          .activation_bytes = 4,
          .all_reduce = kSharedMemory,
          .all_gather = kSharedMemory,
          .reduce_scatter = kSharedMemory,
          .all_to_all = kSharedMemory,
          .source = ""};
}

std::vector<std::string> DeviceNames() {
  std::vector<std::string> names;
  for (const Gpu& gpu : kGpus) names.emplace_back(gpu.name);
  names.emplace_back("cpu");
  return names;
}

absl::StatusOr<DeviceFigures> FindDevice(absl::string_view name, int num_ranks) {
  if (absl::EqualsIgnoreCase(name, "cpu")) return MeasureCpu(num_ranks);
  for (const Gpu& gpu : kGpus) {
    if (absl::EqualsIgnoreCase(name, gpu.name)) return FiguresOf(gpu);
  }
  return absl::InvalidArgumentError(absl::StrCat("--device-type: \"", name, "\" is not one of ",
                                                 absl::StrJoin(DeviceNames(), ", ")));
}

}  // namespace heddle
