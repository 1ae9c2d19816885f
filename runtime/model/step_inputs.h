// What a step reads besides weights and cache: token ids, positions and page tables, in device
// buffers whose addresses never change.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// The largest step.
struct StepLimits {
  int64_t max_tokens = 0;
  int64_t max_sequences = 0;
  int64_t max_pages = 0;       // page-table entries of all sequences together
  int64_t max_logit_rows = 0;  // tokens whose logits are computed at once
};

// What the host must know of a step to enqueue it: shape, nothing else.
struct StepShape {
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  int64_t num_pages = 0;
  int64_t num_logit_rows = 0;
};

// One array in pinned host memory and its copy on the device.
template <typename T>
class StepArray {
 public:
  static absl::StatusOr<StepArray> Create(int64_t size, Backend& backend);

  std::span<T> host() const { return {host_.as<T>(), host_.bytes() / sizeof(T)}; }
  const T* device() const { return device_.as<T>(); }
  // Enqueues the copy of the first `count` elements.
  absl::Status Upload(int64_t count, Backend& backend, Stream& stream) const;

 private:
  DeviceBuffer host_;
  DeviceBuffer device_;
};

// Owned by one rank's worker. The worker fills the host side, calls Upload, and leaves the host
// side alone until the stream has been synchronised.
struct StepInputs {
  StepArray<int32_t> token_ids;       // [tokens]
  StepArray<int32_t> positions;       // [tokens]
  StepArray<int32_t> query_starts;    // [sequences + 1] into tokens
  StepArray<int32_t> page_starts;     // [sequences + 1] into pages
  StepArray<PageSpan> pages;          // [pages] of this rank's stripe, counting this step's tokens
  StepArray<int32_t> append_slots;    // [tokens]; -1: this rank stores nothing
  StepArray<int32_t> append_offsets;  // [tokens] index inside the page
  StepArray<int32_t> logit_rows;      // [logit_rows] into tokens

  static absl::StatusOr<StepInputs> Create(const StepLimits& limits, Backend& backend);
  absl::Status Upload(const StepShape& shape, Backend& backend, Stream& stream) const;
};

}  // namespace heddle
