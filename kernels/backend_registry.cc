#include "kernels/backend_registry.h"

#include "absl/strings/str_cat.h"

namespace heddle {

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options) {
  switch (options.device) {
    case DeviceKind::kCpu:
      if (options.cpu.num_threads < 1) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the CPU back end needs at least 1 thread, not ", options.cpu.num_threads));
      }
      return CreateCpuBackend(options.cpu);
    case DeviceKind::kCuda:
      break;
  }
  return absl::UnimplementedError("this build of Heddle has no CUDA back end; use --device cpu");
}

}  // namespace heddle
