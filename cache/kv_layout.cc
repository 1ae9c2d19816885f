#include "cache/kv_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

absl::StatusOr<int64_t> CheckedProduct(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) {
      return absl::InvalidArgumentError("its bytes overflow 64 bits");
    }
  }
  return product;
}

absl::Status FillStrides(int64_t page_size, KvPlaneLayout& plane) {
  if (!IsFloatingPoint(plane.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("dtype ", DTypeName(plane.dtype),
                                                   "; pages hold float32, bfloat16 or float16"));
  }
  if (plane.num_heads < 0 || plane.first_head < 0 || plane.head_dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat("first head ", plane.first_head, ", ",
                                                   plane.num_heads, " heads of dimension ",
                                                   plane.head_dim));
  }
  ASSIGN_OR_RETURN(plane.head_stride, CheckedProduct({plane.head_dim, page_size}));
  ASSIGN_OR_RETURN(plane.slot_stride, CheckedProduct({plane.head_stride, plane.num_heads}));
  ASSIGN_OR_RETURN(plane.bytes_per_page,
                   CheckedProduct({plane.slot_stride, BlockBytes(plane.dtype)}));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KvLayout> KvLayout::Create(int64_t page_size, std::vector<KvCacheGroup> groups) {
  if (page_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("page size is ", page_size, "; it must be at least 1"));
  }
  KvLayout layout;
  layout.page_size_ = page_size;
  std::map<int64_t, int64_t> group_of_layer;
  for (size_t g = 0; g < groups.size(); ++g) {
    KvCacheGroup& group = groups[g];
    if (group.window < 0) {
      return absl::InvalidArgumentError(absl::StrCat("window ", group.window, " of group ", g));
    }
    for (const int64_t layer : group.layers) {
      if (!group_of_layer.emplace(layer, g).second) {
        return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " is in two groups"));
      }
    }
    for (size_t p = 0; p < group.planes.size(); ++p) {
      KvPlaneLayout& plane = group.planes[p];
      RETURN_IF_ERROR(
          Annotate(FillStrides(page_size, plane), absl::StrCat("plane ", p, " of group ", g)));
      int64_t bytes;
      if (__builtin_mul_overflow(plane.bytes_per_page, static_cast<int64_t>(group.layers.size()),
                                 &bytes) ||
          __builtin_add_overflow(layout.bytes_per_page_, bytes, &layout.bytes_per_page_)) {
        return absl::InvalidArgumentError("the bytes of a page overflow 64 bits");
      }
    }
  }
  for (const auto& [layer, group] : group_of_layer) {
    if (layer != layout.num_layers()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", layout.num_layers(), " is in no group"));
    }
    layout.group_of_layer_.push_back(group);
  }
  layout.groups_ = std::move(groups);
  return layout;
}

absl::StatusOr<KvLayout> KvLayout::ForGqa(int64_t page_size, DType dtype, int64_t first_kv_head,
                                          int64_t local_kv_heads, int64_t head_dim,
                                          const std::vector<int64_t>& layer_windows) {
  std::vector<KvCacheGroup> groups;
  for (size_t layer = 0; layer < layer_windows.size(); ++layer) {
    const int64_t window = layer_windows[layer];
    auto group = std::ranges::find(groups, window, &KvCacheGroup::window);
    if (group == groups.end()) {
      KvPlaneLayout key{.kind = KvPlaneKind::kKey,
                        .dtype = dtype,
                        .first_head = first_kv_head,
                        .num_heads = local_kv_heads,
                        .head_dim = head_dim};
      KvPlaneLayout value = key;
      value.kind = KvPlaneKind::kValue;
      group = groups.insert(groups.end(), {.layers = {}, .window = window, .planes = {key, value}});
    }
    group->layers.push_back(static_cast<int64_t>(layer));
  }
  return Create(page_size, std::move(groups));
}

absl::StatusOr<KvLayout> KvLayout::ForMla(int64_t page_size, DType dtype, int64_t num_latents,
                                          int64_t kv_lora_rank, int64_t qk_rope_head_dim,
                                          int64_t num_layers) {
  KvCacheGroup group;
  group.layers.resize(std::max<int64_t>(num_layers, 0));
  std::iota(group.layers.begin(), group.layers.end(), 0);
  group.planes = {{.kind = KvPlaneKind::kLatent,
                   .dtype = dtype,
                   .num_heads = num_latents,
                   .head_dim = kv_lora_rank},
                  {.kind = KvPlaneKind::kRope,
                   .dtype = dtype,
                   .num_heads = num_latents,
                   .head_dim = qk_rope_head_dim}};
  return Create(page_size, {std::move(group)});
}

const KvCacheGroup& KvLayout::GroupOf(int64_t layer) const {
  CHECK(layer >= 0 && layer < num_layers()) << layer;
  return groups_[group_of_layer_[layer]];
}

int64_t KvLayout::RetentionWindow() const {
  int64_t widest = 0;
  for (const KvCacheGroup& group : groups_) {
    if (group.window == 0) return 0;
    widest = std::max(widest, group.window);
  }
  return widest;
}

}  // namespace heddle
