// Opens a device. The only place that knows which back ends this build has.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/cpu/cpu_backend.h"

namespace heddle {

struct BackendOptions {
  DeviceKind device = DeviceKind::kCpu;
  CpuBackendOptions cpu = {};  // read for DeviceKind::kCpu alone
};

// Unimplemented, with what to do instead, if this build has no back end for the device.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options);

}  // namespace heddle
