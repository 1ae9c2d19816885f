// How keys and values lie in the pages of one rank, in bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"

namespace heddle {

enum class KvPlaneKind : uint8_t {
  kKey,     // [slots, heads, head_dim, page_size]
  kValue,   // [slots, heads, page_size, head_dim]
  kLatent,  // MLA's compressed keys and values: [slots, 1, page_size, head_dim]
  kRope,    // MLA's rotated key: [slots, 1, page_size, head_dim]
};

// One plane of each layer of a group. Planes of a group may differ in dtype and in the heads they
// hold, e.g. a few heads kept at higher precision.
struct KvPlaneLayout {
  KvPlaneKind kind = KvPlaneKind::kKey;
  DType dtype = DType::kFloat32;
  int64_t first_head = 0;  // among the model's KV heads
  int64_t num_heads = 0;   // 0: this rank stores nothing
  int64_t head_dim = 0;
  // Filled by KvLayout::Create.
  int64_t head_stride = 0;  // elements
  int64_t slot_stride = 0;  // elements
  int64_t bytes_per_page = 0;
};

// Layers whose pages live equally long and are seen through the same window.
struct KvCacheGroup {
  std::vector<int64_t> layers;
  int64_t window = 0;  // 0: none
  std::vector<KvPlaneLayout> planes;
};

// All layers of a rank. One page id stands for that page in every plane of every layer, so a page
// is kept as long as the layer with the widest view needs it.
class KvLayout {
 public:
  // Every layer of 0 .. n-1 must be in one group. InvalidArgument names what is wrong, sizes that
  // overflow included.
  static absl::StatusOr<KvLayout> Create(int64_t page_size, std::vector<KvCacheGroup> groups);
  // Grouped queries (MHA and MQA are its ends): a key and a value plane a layer.
  // layer_windows: [num_layers].
  static absl::StatusOr<KvLayout> ForGqa(int64_t page_size, DType dtype, int64_t first_kv_head,
                                         int64_t local_kv_heads, int64_t head_dim,
                                         const std::vector<int64_t>& layer_windows);
  // MLA: a latent and a rotated key a token and layer, whatever the number of heads. num_latents is
  // 1, or 0 on a rank that stores nothing.
  static absl::StatusOr<KvLayout> ForMla(int64_t page_size, DType dtype, int64_t num_latents,
                                         int64_t kv_lora_rank, int64_t qk_rope_head_dim,
                                         int64_t num_layers);

  int64_t page_size() const { return page_size_; }
  const std::vector<KvCacheGroup>& groups() const { return groups_; }
  const KvCacheGroup& GroupOf(int64_t layer) const;
  int64_t num_layers() const { return static_cast<int64_t>(group_of_layer_.size()); }
  // The widest window of all layers; 0 if one of them sees everything.
  int64_t RetentionWindow() const;

  // Over all layers; 0 for a rank without KV heads.
  int64_t bytes_per_page() const { return bytes_per_page_; }
  int64_t bytes_per_token() const { return bytes_per_page_ / page_size_; }

 private:
  KvLayout() = default;

  int64_t page_size_ = 0;
  std::vector<KvCacheGroup> groups_;
  std::vector<int64_t> group_of_layer_;
  int64_t bytes_per_page_ = 0;
};

}  // namespace heddle
