// All ranks refuse together, or none does.
#pragma once

#include "absl/status/status.h"
#include "parallel/control_channel.h"

namespace heddle {

// Collective: OK if every rank's status is, else the lowest failing rank's error on all ranks. For
// what each rank checks alone before the ranks depend on each other.
absl::Status AgreeOnStatus(const absl::Status& status, ControlChannel& control);

}  // namespace heddle
