// The bytes behind the page ids, on one rank.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/kv_layout.h"
#include "kernels/base/backend.h"
#include "kernels/paged_kv_view.h"

namespace heddle {

// Owned by a worker and used from its thread; must not outlive its Backend. One allocation a plane
// and layer, none where the rank holds no heads.
class PagePool {
 public:
  // ResourceExhausted, with the bytes asked for in all, when the device is short of memory.
  static absl::StatusOr<PagePool> Create(Backend& backend, KvLayout layout, int64_t num_pages);

  const KvLayout& layout() const { return layout_; }
  int64_t num_pages() const { return num_pages_; }
  int64_t bytes() const { return num_pages_ * layout_.bytes_per_page(); }

  // `data` is null where the rank holds no heads. The layer must have a plane of that kind.
  KvPlane Plane(int64_t layer, KvPlaneKind kind) const;
  // Copies whole pages, in all planes of all layers. The lists are in device memory; no page may be
  // both a source and a target.
  absl::Status CopyPages(const int32_t* source_slots, const int32_t* target_slots,
                         int64_t num_copies, Stream& stream);
  // Sets every byte; 0xFF makes each number a NaN, so that tests see a read of an unused slot.
  absl::Status Fill(int byte, Stream& stream);

 private:
  PagePool(Backend& backend, KvLayout layout, int64_t num_pages);

  Backend* backend_;
  KvLayout layout_;
  int64_t num_pages_;
  std::vector<std::vector<DeviceBuffer>> buffers_;  // [layer][plane of its group]
};

}  // namespace heddle
