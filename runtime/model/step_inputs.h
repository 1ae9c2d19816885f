// What a step reads besides weights and cache: token ids, positions and page tables, in device
// buffers whose addresses never change.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/paged_kv_view.h"
#include "parallel/shard_spec.h"

namespace heddle {

// The largest step.
struct StepLimits {
  int64_t max_tokens = 0;
  int64_t max_sequences = 0;
  int64_t max_pages = 0;       // page-table entries of all sequences together
  int64_t max_logit_rows = 0;  // tokens whose logits are computed at once
  // Of MLA's expanded prefill; 0 for other models.
  int64_t max_piece_tokens = 0;  // tokens of a ContextPiece
  int64_t max_pieces = 0;        // of one step
  int64_t max_piece_pages = 0;   // of a piece, where other stripes hold some of them
};

// MLA expands the contexts of a step's prompts in pieces of bounded memory: whole contexts of
// several sequences, or a part of one.
struct ContextPiece {
  int64_t first_sequence = 0;  // of the step
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;
  // Where its arrays begin in StepInputs: num_sequences + 1 starts, num_sequences positions.
  int64_t segment_starts = 0;
  int64_t segment_positions = 0;
  bool first = false;  // holds the beginnings of its sequences
  bool last = false;   // holds their ends
  // Where the cache is striped, the pages that earlier steps stored are gathered first, ordered by
  // stripe. The arrays begin here in StepInputs: num_sequences + 1 starts, the sequences' pages,
  // and this stripe's.
  int64_t page_starts = 0;
  int64_t pages = 0;
  int64_t own_pages = 0;
  std::vector<int64_t> pages_per_stripe = {};
};

// What the host must know of a step to enqueue it: shape, nothing else.
//
// MLA computes prompts with expanded keys and values and generated tokens in latent space, also
// when they are recomputed. So its tokens of the second kind come first, and a run of tokens that
// has both counts as two sequences.
//
// With data-parallel attention the tokens come in order of the ranks that attend for them, each
// rank's in the order above; and all that attention reads, from positions to pieces, is of this
// rank's tokens alone, counted from its first.
struct StepShape {
  int64_t num_tokens = 0;
  Range own_tokens = {};                      // for which this rank attends: all, or its part
  std::vector<int64_t> tokens_per_rank = {};  // only with data-parallel attention
  int64_t num_sequences = 0;
  int64_t num_absorbed_tokens = 0;     // MLA: the first ones of own_tokens
  int64_t num_absorbed_sequences = 0;  // MLA: the first ones
  std::vector<ContextPiece> pieces;    // MLA: of the other sequences
  int64_t num_piece_pages = 0;         // of all pieces, gathered
  int64_t num_own_piece_pages = 0;     // those of this stripe
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
  StepArray<int32_t> positions;       // [own tokens]
  StepArray<int32_t> query_starts;    // [sequences + 1] into own tokens
  StepArray<int32_t> page_starts;     // [sequences + 1] into pages
  StepArray<PageSpan> pages;          // [pages] of this rank's stripe, counting this step's tokens
  StepArray<int32_t> append_slots;    // [own tokens]; -1: this rank stores nothing
  StepArray<int32_t> append_offsets;  // [own tokens] index inside the page
  StepArray<int32_t> logit_rows;      // [logit_rows] into tokens
  // Of all pieces, one behind the other: where the tokens of each of its sequences begin in it, and
  // their positions. Only for MLA.
  StepArray<int32_t> segment_starts;
  StepArray<int32_t> segment_positions;
  // Of all pieces, only for MLA on a striped cache: gathered pages of each sequence, and of this
  // stripe's pages the slots in the pool and among the gathered.
  StepArray<int32_t> piece_page_starts;
  StepArray<PageSpan> piece_pages;
  StepArray<int32_t> own_page_sources;
  StepArray<int32_t> own_page_targets;

  static absl::StatusOr<StepInputs> Create(const StepLimits& limits, Backend& backend);
  absl::Status Upload(const StepShape& shape, Backend& backend, Stream& stream) const;
};

}  // namespace heddle
