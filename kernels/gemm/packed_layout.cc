#include "kernels/gemm/packed_layout.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMaxDimension = int64_t{1} << 48;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

}  // namespace

absl::StatusOr<PackedLayout> PackedLayout::Create(const PackedWeight& weight) {
  const DType dtype = weight.dtype;
  const int64_t n = weight.n, k = weight.k, k_offset = weight.k_offset;
  if (!IsFloatingPoint(dtype) && !IsQuantised(dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights cannot be stored as ", DTypeName(dtype)));
  }
  if (n < 0 || k < 0 || n > kMaxDimension || k > kMaxDimension) {
    return absl::InvalidArgumentError(absl::StrCat("a weight of [", n, ", ", k, "]"));
  }
  const bool is_float8 = dtype == DType::kFloat8E4M3;
  const int64_t block = is_float8 ? weight.block_columns : BlockElements(dtype);
  if (block < 1 || block > kMaxDimension) {
    return absl::InvalidArgumentError(
        absl::StrCat("a weight of ", DTypeName(dtype), " in blocks of ", block, " columns"));
  }
  if (k_offset < 0 || k_offset >= block) {
    return absl::InvalidArgumentError(absl::StrCat("k_offset ", k_offset, " is outside a block of ",
                                                   block, " (", DTypeName(dtype), ")"));
  }
  PackedLayout layout;
  layout.num_panels = DivideUp(n, kPanelColumns);
  if (IsBlockQuantised(dtype)) {
    layout.lead = k_offset % kGroupElements;
    layout.num_groups = DivideUp(layout.lead + k, kGroupElements);
    layout.padded_k = layout.num_groups * kGroupElements;
    if (BlockTraitsOf(dtype).is_k_quant) {
      layout.first_group = k_offset / kGroupElements;
      const int64_t num_blocks = DivideUp(layout.first_group + layout.num_groups, kSuperGroups);
      const int64_t values = BlockTraitsOf(dtype).has_minimum ? 2 : 1;
      const int64_t block_bytes = kPanelColumns * values * static_cast<int64_t>(sizeof(uint16_t));
      layout.scales_offset = RoundUp(num_blocks * block_bytes, kCacheLine);
    }
    layout.quants_offset =
        RoundUp(layout.scales_offset + layout.num_groups * GroupScaleBytes(dtype), kCacheLine);
    layout.panel_bytes = layout.quants_offset + layout.num_groups * GroupQuantBytes(dtype);
  } else {
    // Steps of k begin where those of whole rows do, so that blocks of such a width keep to them.
    if (is_float8) layout.lead = k_offset % kPlainStep;
    layout.padded_k = RoundUp(layout.lead + k, kPlainStep);
    if (is_float8) {
      layout.block_columns = block;
      layout.block_offset = k_offset - layout.lead;
      // The padding has scales too.
      layout.quants_offset = DivideUp(layout.block_offset + layout.padded_k, block) *
                             kPanelColumns * static_cast<int64_t>(sizeof(float));
    }
    layout.panel_bytes = layout.quants_offset + layout.padded_k * kPanelColumns * BlockBytes(dtype);
  }
  if (int64_t total; __builtin_mul_overflow(layout.num_panels, layout.panel_bytes, &total)) {
    return absl::InvalidArgumentError(absl::StrCat("a weight of [", n, ", ", k, "] overflows"));
  }
  return layout;
}

PackedLayout PackedLayout::Of(const PackedWeight& weight) {
  auto layout = Create(weight);
  CHECK_OK(layout.status());
  return *layout;
}

}  // namespace heddle
