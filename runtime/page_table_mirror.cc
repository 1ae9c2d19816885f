#include "runtime/page_table_mirror.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {

absl::Status PageTableMirror::CheckLocation(const PageLocation& location) const {
  if (location.stripe < 0 || location.stripe >= num_stripes_ || location.slot < 0 ||
      location.slot >= num_pages_) {
    return absl::InternalError(absl::StrCat("step plan: page (", location.stripe, ", ",
                                            location.slot, ") lies outside ", num_stripes_,
                                            " stripes of ", num_pages_, " pages"));
  }
  return absl::OkStatus();
}

absl::Status PageTableMirror::Apply(const StepPlan& plan) {
  const auto check_slot = [&](int32_t slot) -> absl::Status {
    if (slot >= 0 && slot < static_cast<int64_t>(tables_.size())) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("step plan: batch slot ", slot, " of ", tables_.size()));
  };
  for (const int32_t slot : plan.released_slots) {
    RETURN_IF_ERROR(check_slot(slot));
    tables_[slot] = PageTable();
  }
  for (const PageTableDelta& delta : plan.page_deltas) {
    RETURN_IF_ERROR(check_slot(delta.batch_slot));
    for (const PageLocation& location : delta.appended) RETURN_IF_ERROR(CheckLocation(location));
    RETURN_IF_ERROR(Annotate(ApplyPageTableDelta(delta, &tables_[delta.batch_slot]), "step plan"));
  }
  return absl::OkStatus();
}

uint64_t PageTableMirror::Digest() const {
  uint64_t digest = 0;
  for (size_t slot = 0; slot < tables_.size(); ++slot) {
    digest += DigestPageTable(static_cast<int32_t>(slot), tables_[slot]);
  }
  return digest;
}

}  // namespace heddle
