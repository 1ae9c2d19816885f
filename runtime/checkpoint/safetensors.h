// The safetensors format: 8 bytes of header length, a JSON header, tensors back to back.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/checkpoint/stored_tensor.h"

namespace heddle {

// Parses and checks the header of a whole file. Every span returned lies inside `contents`, has
// the size its type and shape ask for, and overlaps no other.
absl::StatusOr<std::vector<StoredTensor>> ParseSafetensors(absl::string_view contents,
                                                           absl::string_view file_name);

}  // namespace heddle
