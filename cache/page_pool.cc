#include "cache/page_pool.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {

PagePool::PagePool(Backend& backend, KvLayout layout, int64_t num_pages)
    : backend_(&backend), layout_(std::move(layout)), num_pages_(num_pages) {}

absl::StatusOr<PagePool> PagePool::Create(Backend& backend, KvLayout layout, int64_t num_pages) {
  if (num_pages < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("number of KV pages is ", num_pages, "; it must be at least 1"));
  }
  int64_t total;
  if (__builtin_mul_overflow(num_pages, layout.bytes_per_page(), &total)) {
    return absl::InvalidArgumentError(absl::StrCat(
        num_pages, " KV pages of ", layout.bytes_per_page(), " bytes overflow 64 bits"));
  }
  PagePool pool(backend, std::move(layout), num_pages);
  for (int64_t layer = 0; layer < pool.layout_.num_layers(); ++layer) {
    std::vector<DeviceBuffer>& buffers = pool.buffers_.emplace_back();
    for (const KvPlaneLayout& plane : pool.layout_.GroupOf(layer).planes) {
      DeviceBuffer& buffer = buffers.emplace_back();
      if (plane.bytes_per_page == 0) continue;
      auto allocated = backend.Allocate(num_pages * plane.bytes_per_page);
      if (!allocated.ok()) {
        return Annotate(allocated.status(),
                        absl::StrCat("KV pages of layer ", layer, " (", num_pages, " pages, ",
                                     total, " bytes over all layers)"));
      }
      buffer = *std::move(allocated);
    }
  }
  return pool;
}

KvPlane PagePool::Plane(int64_t layer, KvPlaneKind kind) const {
  const std::vector<KvPlaneLayout>& planes = layout_.GroupOf(layer).planes;
  for (size_t i = 0; i < planes.size(); ++i) {
    if (planes[i].kind != kind) continue;
    return {.data = buffers_[layer][i].data(),
            .dtype = planes[i].dtype,
            .slot_stride = planes[i].slot_stride,
            .head_stride = planes[i].head_stride};
  }
  CHECK(false) << "layer " << layer << " has no plane of kind " << static_cast<int>(kind);
  return {};
}

absl::Status PagePool::CopyPages(const int32_t* source_slots, const int32_t* target_slots,
                                 int64_t num_copies, Stream& stream) {
  for (int64_t layer = 0; layer < layout_.num_layers(); ++layer) {
    for (const KvPlaneLayout& plane : layout_.GroupOf(layer).planes) {
      if (plane.bytes_per_page == 0) continue;
      RETURN_IF_ERROR(backend_->kernels().kv_copy_pages({.source = Plane(layer, plane.kind),
                                                         .target = Plane(layer, plane.kind),
                                                         .bytes_per_page = plane.bytes_per_page,
                                                         .source_slots = source_slots,
                                                         .target_slots = target_slots,
                                                         .num_pages = num_copies},
                                                        stream));
    }
  }
  return absl::OkStatus();
}

absl::Status PagePool::Fill(int byte, Stream& stream) {
  for (const std::vector<DeviceBuffer>& layer : buffers_) {
    for (const DeviceBuffer& buffer : layer) {
      if (buffer.bytes() == 0) continue;
      RETURN_IF_ERROR(backend_->MemsetAsync(buffer.data(), byte, buffer.bytes(), stream));
    }
  }
  return absl::OkStatus();
}

}  // namespace heddle
