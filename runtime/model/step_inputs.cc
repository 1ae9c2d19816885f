#include "runtime/model/step_inputs.h"

#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {

template <typename T>
absl::StatusOr<StepArray<T>> StepArray<T>::Create(int64_t size, Backend& backend) {
  const size_t bytes = static_cast<size_t>(size) * sizeof(T);
  StepArray array;
  ASSIGN_OR_RETURN(array.host_, backend.AllocatePinned(bytes));
  ASSIGN_OR_RETURN(array.device_, backend.Allocate(bytes));
  return array;
}

template <typename T>
absl::Status StepArray<T>::Upload(int64_t count, Backend& backend, Stream& stream) const {
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  CHECK(count >= 0 && bytes <= host_.bytes()) << count;
  if (count == 0) return absl::OkStatus();
  return backend.CopyAsync(device_.data(), host_.data(), bytes, stream);
}

template class StepArray<int32_t>;
template class StepArray<PageSpan>;

absl::StatusOr<StepInputs> StepInputs::Create(const StepLimits& limits, Backend& backend) {
  const auto ints = [&backend](int64_t size) { return StepArray<int32_t>::Create(size, backend); };
  StepInputs inputs;
  ASSIGN_OR_RETURN(inputs.token_ids, ints(limits.max_tokens));
  ASSIGN_OR_RETURN(inputs.positions, ints(limits.max_tokens));
  ASSIGN_OR_RETURN(inputs.query_starts, ints(limits.max_sequences + 1));
  ASSIGN_OR_RETURN(inputs.page_starts, ints(limits.max_sequences + 1));
  ASSIGN_OR_RETURN(inputs.pages, StepArray<PageSpan>::Create(limits.max_pages, backend));
  ASSIGN_OR_RETURN(inputs.append_slots, ints(limits.max_tokens));
  ASSIGN_OR_RETURN(inputs.append_offsets, ints(limits.max_tokens));
  ASSIGN_OR_RETURN(inputs.logit_rows, ints(limits.max_logit_rows));
  // A piece has one start more than it has sequences; a sequence that spans pieces is in each.
  const int64_t max_segments = limits.max_pieces > 0 ? limits.max_sequences + limits.max_pieces : 0;
  ASSIGN_OR_RETURN(inputs.segment_starts, ints(max_segments + limits.max_pieces));
  ASSIGN_OR_RETURN(inputs.segment_positions, ints(max_segments));
  if (limits.max_piece_pages > 0) {
    // A page that two pieces share is gathered for both.
    const int64_t max_pages = limits.max_pages + limits.max_pieces;
    ASSIGN_OR_RETURN(inputs.piece_page_starts, ints(max_segments + limits.max_pieces));
    ASSIGN_OR_RETURN(inputs.piece_pages, StepArray<PageSpan>::Create(max_pages, backend));
    ASSIGN_OR_RETURN(inputs.own_page_sources, ints(max_pages));
    ASSIGN_OR_RETURN(inputs.own_page_targets, ints(max_pages));
  }
  return inputs;
}

absl::Status StepInputs::Upload(const StepShape& shape, Backend& backend, Stream& stream) const {
  RETURN_IF_ERROR(token_ids.Upload(shape.num_tokens, backend, stream));
  const int64_t own_tokens = shape.own_tokens.size();
  RETURN_IF_ERROR(positions.Upload(own_tokens, backend, stream));
  RETURN_IF_ERROR(query_starts.Upload(shape.num_sequences + 1, backend, stream));
  RETURN_IF_ERROR(page_starts.Upload(shape.num_sequences + 1, backend, stream));
  RETURN_IF_ERROR(pages.Upload(shape.num_pages, backend, stream));
  RETURN_IF_ERROR(append_slots.Upload(own_tokens, backend, stream));
  RETURN_IF_ERROR(append_offsets.Upload(own_tokens, backend, stream));
  if (!shape.pieces.empty()) {
    const ContextPiece& last = shape.pieces.back();
    RETURN_IF_ERROR(
        segment_starts.Upload(last.segment_starts + last.num_sequences + 1, backend, stream));
    RETURN_IF_ERROR(
        segment_positions.Upload(last.segment_positions + last.num_sequences, backend, stream));
    if (!last.pages_per_stripe.empty()) {
      RETURN_IF_ERROR(
          piece_page_starts.Upload(last.page_starts + last.num_sequences + 1, backend, stream));
      RETURN_IF_ERROR(piece_pages.Upload(shape.num_piece_pages, backend, stream));
      RETURN_IF_ERROR(own_page_sources.Upload(shape.num_own_piece_pages, backend, stream));
      RETURN_IF_ERROR(own_page_targets.Upload(shape.num_own_piece_pages, backend, stream));
    }
  }
  return logit_rows.Upload(shape.num_logit_rows, backend, stream);
}

}  // namespace heddle
