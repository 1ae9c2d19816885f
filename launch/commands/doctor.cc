#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cpu/thread_pool.h"
#include "launch/bootstrap.h"
#include "launch/commands/commands.h"
#include "launch/version.h"
#include "runtime/memory_share.h"

namespace heddle {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
// A rank's windows, its collectives' buffers and MPI's own.
constexpr double kSharedMemoryNeeded = 64.0 * 1024 * 1024;

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

double TotalMemory() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

int NumNvidiaDevices() {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename();
    if (name.rfind("nvidia", 0) == 0 && name.size() > 6 &&
        name.find_first_not_of("0123456789", 6) == std::string::npos) {
      ++count;
    }
  }
  return count;
}

class Report {
 public:
  void Fact(const char* name, const std::string& value) {
    std::printf("%-18s %s\n", name, value.c_str());
  }
  void Advise(std::string advice) { advice_.push_back(std::move(advice)); }

  void Print() const {
    std::printf("\n");
    if (advice_.empty()) std::printf("nothing to change\n");
    for (const std::string& advice : advice_) std::printf("! %s\n", advice.c_str());
  }

 private:
  std::vector<std::string> advice_;
};

}  // namespace

absl::StatusOr<int> RunDoctor() {
  Report report;
  report.Fact("heddle", kHeddleVersion);
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  report.Fact("host", host);

  const int allowed = NumAllowedCpus();
  const auto online = static_cast<int>(std::thread::hardware_concurrency());
  report.Fact("CPU", CpuName());
  report.Fact("CPUs", absl::StrCat(allowed, " allowed of ", online));
  report.Fact("memory",
              absl::StrFormat("%.1f GiB available of %.1f",
                              static_cast<double>(FreeMemory()) / kGiB, TotalMemory() / kGiB));
  struct statvfs shm = {};
  if (statvfs("/dev/shm", &shm) == 0) {
    const double free_bytes = static_cast<double>(shm.f_bavail) * static_cast<double>(shm.f_frsize);
    report.Fact("/dev/shm", absl::StrFormat("%.2f GiB free", free_bytes / kGiB));
    if (free_bytes < kSharedMemoryNeeded) {
      report.Advise(absl::StrFormat(
          "/dev/shm has %.0f MiB free, ranks of one node need at least %.0f: in a container start "
          "it with --shm-size=1g",
          free_bytes / 1024 / 1024, kSharedMemoryNeeded / 1024 / 1024));
    }
  } else {
    report.Fact("/dev/shm", "missing");
    report.Advise("/dev/shm is missing: ranks of one node talk through it; mount a tmpfs there");
  }

  const LauncherFacts launcher = ReadLauncher();
  report.Fact("MPI", MpiLibraryVersion());
  report.Fact("launcher", launcher.description);
  const absl::Status launched = CheckLauncher(launcher, launcher.under_mpi ? 2 : 1);
  if (!launched.ok()) report.Advise(std::string(launched.message()));
  if (geteuid() == 0 && (std::getenv("OMPI_ALLOW_RUN_AS_ROOT") == nullptr ||
                         std::getenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == nullptr)) {
    report.Advise(
        "running as root: mpirun needs --allow-run-as-root, or OMPI_ALLOW_RUN_AS_ROOT=1 and "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1");
  }
  if (allowed == 1 && online > 1) {
    report.Advise(
        "this process may use one CPU only: mpirun binds each rank to a core by default; give "
        "--bind-to none, or --map-by slot:PE=N for N threads a rank");
  }

  const int devices = NumNvidiaDevices();
  report.Fact("NVIDIA GPUs", absl::StrCat(devices));
  if (devices > 0) report.Advise("this build runs on the CPU; the GPUs will be idle");
  report.Print();
  return kExitOk;
}

}  // namespace heddle
