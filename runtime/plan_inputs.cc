#include "runtime/plan_inputs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

class Filler {
 public:
  Filler(const StepPlan& plan, const PlanInputsOptions& options,
         const std::vector<std::optional<SequenceState>>& slots, const PageTableMirror& tables,
         const StepInputs& inputs)
      : plan_(plan), options_(options), slots_(slots), tables_(tables), inputs_(inputs) {}

  absl::StatusOr<PlanInputs> Fill() && {
    for (const PlanRow& row : plan_.rows) RETURN_IF_ERROR(AddRow(row));
    inputs_.query_starts.host()[0] = 0;
    inputs_.page_starts.host()[0] = 0;
    ASSIGN_OR_RETURN(const std::vector<std::vector<size_t>> shares, DealRows());
    for (size_t rank = 0; rank < shares.size(); ++rank) {
      is_own_ = !options_.dp_attention || static_cast<int>(rank) == options_.stripe;
      RETURN_IF_ERROR(AddShare(shares[rank]));
    }
    StepShape& shape = filled_.shape;
    for (size_t i = 0; i < plan_.rows.size(); ++i) {
      const PlanRow& row = plan_.rows[i];
      if (!row.sample) continue;
      inputs_.logit_rows.host()[shape.num_logit_rows++] =
          static_cast<int32_t>(filled_.rows[i].TokenAt(RowEnd(row) - 1));
      filled_.sampled.push_back(&*slots_[row.batch_slot]);
    }
    return std::move(filled_);
  }

 private:
  static int64_t RowEnd(const PlanRow& row) {
    return int64_t{row.first_position} + row.query_length;
  }

  // Checks a row and divides it.
  absl::Status AddRow(const PlanRow& row) {
    if (row.batch_slot < 0 || row.batch_slot >= static_cast<int64_t>(slots_.size()) ||
        !slots_[row.batch_slot].has_value()) {
      return absl::InternalError(
          absl::StrCat("step plan: batch slot ", row.batch_slot, " is empty"));
    }
    const SequenceState& state = *slots_[row.batch_slot];
    const int64_t end = RowEnd(row);
    if (row.query_length < 1 || row.first_position < 0 || end > state.position() ||
        (row.sample && end != state.position())) {
      return absl::InternalError(absl::StrCat("step plan: row of positions ", row.first_position,
                                              " to ", end, " in a sequence of ", state.position()));
    }
    int64_t absorbed_position = end;
    if (options_.mla && options_.has_cache) {
      const int64_t begin = options_.absorb_prompts ? 0 : state.prompt_length();
      absorbed_position = std::clamp<int64_t>(begin, row.first_position, end);
    }
    filled_.rows.push_back({.first_position = row.first_position,
                            .first_token = 0,
                            .absorbed_position = absorbed_position,
                            .absorbed_token = 0});
    return absl::OkStatus();
  }

  // Which rows each rank attends for; without data-parallel attention one share of all.
  absl::StatusOr<std::vector<std::vector<size_t>>> DealRows() const {
    std::vector<std::vector<size_t>> shares(options_.dp_attention ? options_.num_stripes : 1);
    for (size_t i = 0; i < plan_.rows.size(); ++i) {
      int32_t owner = 0;
      if (options_.dp_attention) {
        const int32_t slot = plan_.rows[i].batch_slot;
        const std::vector<PageLocation>& pages = tables_.table(slot).pages;
        if (pages.empty()) {
          return absl::InternalError(absl::StrCat("step plan: slot ", slot, " has no page"));
        }
        owner = pages.front().stripe;
        for (const PageLocation& page : pages) {
          if (page.stripe == owner) continue;
          return absl::InternalError(absl::StrCat("step plan: slot ", slot, " has pages on rank ",
                                                  owner, " and on rank ", page.stripe));
        }
      }
      shares[owner].push_back(i);
    }
    return shares;
  }

  // Adds the rows of one rank.
  absl::Status AddShare(const std::vector<size_t>& rows) {
    StepShape& shape = filled_.shape;
    const int64_t begin = shape.num_tokens;
    if (is_own_) shape.own_tokens.begin = begin;
    for (const size_t i : rows) {
      RowTokens& row = filled_.rows[i];
      row.absorbed_token = shape.num_tokens;
      RETURN_IF_ERROR(AddRun(plan_.rows[i], row.absorbed_position, RowEnd(plan_.rows[i])));
    }
    if (is_own_) {
      shape.num_absorbed_tokens = shape.num_tokens - begin;
      shape.num_absorbed_sequences = shape.num_sequences;
    }
    for (const size_t i : rows) {
      RowTokens& row = filled_.rows[i];
      row.first_token = shape.num_tokens;
      if (is_own_ && options_.mla && row.first_position < row.absorbed_position) {
        AddContext(row.absorbed_position, row.first_position,
                   tables_.table(plan_.rows[i].batch_slot));
      }
      RETURN_IF_ERROR(AddRun(plan_.rows[i], row.first_position, row.absorbed_position));
    }
    if (is_own_) {
      ClosePiece();
      shape.own_tokens.end = shape.num_tokens;
    }
    if (options_.dp_attention) shape.tokens_per_rank.push_back(shape.num_tokens - begin);
    return absl::OkStatus();
  }

  // Tokens [begin, end) of a row; if they are this rank's, as one sequence of the step.
  absl::Status AddRun(const PlanRow& row, int64_t begin, int64_t end) {
    if (begin == end) return absl::OkStatus();
    StepShape& shape = filled_.shape;
    if ((is_own_ && shape.num_sequences == options_.limits.max_sequences) ||
        shape.num_tokens + (end - begin) > options_.limits.max_tokens) {
      return absl::InternalError(absl::StrCat("step plan: ", plan_.rows.size(), " rows of ",
                                              plan_.NumTokens(), " tokens are above the limits"));
    }
    const SequenceState& state = *slots_[row.batch_slot];
    for (int64_t position = begin; position < end; ++position) {
      const int64_t token = shape.num_tokens++;
      inputs_.token_ids.host()[token] = state.token_ids()[position];
      if (!is_own_) continue;
      const int64_t own_token = token - shape.own_tokens.begin;
      inputs_.positions.host()[own_token] = static_cast<int32_t>(position);
      if (options_.has_cache) RETURN_IF_ERROR(AddAppend(row.batch_slot, position, own_token));
    }
    if (!is_own_) return absl::OkStatus();
    if (options_.has_cache) AddPages(tables_.table(row.batch_slot), end);
    ++shape.num_sequences;
    inputs_.query_starts.host()[shape.num_sequences] =
        static_cast<int32_t>(shape.num_tokens - shape.own_tokens.begin);
    inputs_.page_starts.host()[shape.num_sequences] = static_cast<int32_t>(shape.num_pages);
    return absl::OkStatus();
  }

  absl::Status AddAppend(int32_t batch_slot, int64_t position, int64_t token) {
    const PageTable& table = tables_.table(batch_slot);
    const int64_t page = position / options_.page_size;
    if (page < table.first_page || page >= table.end_page()) {
      return absl::InternalError(
          absl::StrCat("step plan: slot ", batch_slot, " has no page for position ", position));
    }
    const PageLocation& location = table.pages[page - table.first_page];
    inputs_.append_slots.host()[token] = location.stripe == options_.stripe ? location.slot : -1;
    inputs_.append_offsets.host()[token] = static_cast<int32_t>(position % options_.page_size);
    return absl::OkStatus();
  }

  // This rank's pages of a sequence whose first `end` positions are stored before it attends.
  void AddPages(const PageTable& table, int64_t end) {
    int64_t first_position = table.first_page * options_.page_size;
    for (const PageLocation& location : table.pages) {
      if (first_position >= end) break;
      if (location.stripe == options_.stripe) {
        inputs_.pages.host()[filled_.shape.num_pages++] = {
            location.slot, static_cast<int32_t>(std::min(options_.page_size, end - first_position)),
            static_cast<int32_t>(first_position)};
      }
      first_position += options_.page_size;
    }
  }

  // Whether other ranks hold pages of the contexts that this one expands.
  bool GathersPieces() const { return options_.num_stripes > 1 && !options_.dp_attention; }

  // The sequence that is added next expands a context of `length` tokens, of which the first
  // `num_stored` are in the pages of `table`.
  void AddContext(int64_t length, int64_t num_stored, const PageTable& table) {
    const int64_t most = options_.limits.max_piece_tokens;
    if (piece_.num_tokens + length > most) ClosePiece();
    for (int64_t begin = 0; begin < length; begin += most) {
      if (begin > 0) ClosePiece();
      if (piece_.num_sequences == 0) {
        piece_.first_sequence = filled_.shape.num_sequences;
        piece_.first = begin == 0;
        inputs_.segment_starts.host()[piece_.segment_starts] = 0;
      }
      const int64_t count = std::min(most, length - begin);
      piece_.last = begin + count == length;
      piece_.num_tokens += count;
      inputs_.segment_positions.host()[piece_.segment_positions + piece_.num_sequences] =
          static_cast<int32_t>(begin);
      ++piece_.num_sequences;
      inputs_.segment_starts.host()[piece_.segment_starts + piece_.num_sequences] =
          static_cast<int32_t>(piece_.num_tokens);
      if (GathersPieces()) AddPiecePages(begin, std::min(begin + count, num_stored), table);
    }
    // A context that was cut keeps its last piece for itself: `first` is the same for all of it.
    if (length > most) ClosePiece();
  }

  // The pages, of any stripe, that hold the positions [begin, end) of the piece's newest sequence.
  void AddPiecePages(int64_t begin, int64_t end, const PageTable& table) {
    const int64_t size = options_.page_size;
    for (int64_t page = begin / size; page * size < end; ++page) {
      const PageLocation& location = table.pages[page - table.first_page];
      piece_locations_.push_back(location);
      inputs_.piece_pages.host()[filled_.shape.num_piece_pages++] = {
          .slot = 0,  // known when the piece is closed
          .num_valid = static_cast<int32_t>(std::min(size, end - page * size)),
          .first_position = static_cast<int32_t>(page * size)};
    }
    inputs_.piece_page_starts.host()[piece_.page_starts + piece_.num_sequences] =
        static_cast<int32_t>(piece_locations_.size());
  }

  // Orders the piece's pages by stripe, then as the sequences have them.
  void PlacePiecePages() {
    piece_.pages_per_stripe.assign(options_.num_stripes, 0);
    for (const PageLocation& location : piece_locations_) {
      ++piece_.pages_per_stripe[location.stripe];
    }
    std::vector<int64_t> next(options_.num_stripes, 0);
    for (int stripe = 1; stripe < options_.num_stripes; ++stripe) {
      next[stripe] = next[stripe - 1] + piece_.pages_per_stripe[stripe - 1];
    }
    inputs_.piece_page_starts.host()[piece_.page_starts] = 0;
    for (size_t i = 0; i < piece_locations_.size(); ++i) {
      const PageLocation& location = piece_locations_[i];
      const auto slot = static_cast<int32_t>(next[location.stripe]++);
      inputs_.piece_pages.host()[piece_.pages + i].slot = slot;
      if (location.stripe != options_.stripe) continue;
      const int64_t own = filled_.shape.num_own_piece_pages++;
      inputs_.own_page_sources.host()[own] = location.slot;
      inputs_.own_page_targets.host()[own] = slot;
    }
    piece_locations_.clear();
  }

  void ClosePiece() {
    if (piece_.num_sequences == 0) return;
    if (GathersPieces()) PlacePiecePages();
    filled_.shape.pieces.push_back(piece_);
    piece_ = {.segment_starts = piece_.segment_starts + piece_.num_sequences + 1,
              .segment_positions = piece_.segment_positions + piece_.num_sequences,
              .page_starts = piece_.page_starts + piece_.num_sequences + 1,
              .pages = filled_.shape.num_piece_pages,
              .own_pages = filled_.shape.num_own_piece_pages};
  }

  const StepPlan& plan_;
  const PlanInputsOptions& options_;
  const std::vector<std::optional<SequenceState>>& slots_;
  const PageTableMirror& tables_;
  const StepInputs& inputs_;
  PlanInputs filled_;
  bool is_own_ = true;                         // whether the rows being added are this rank's
  ContextPiece piece_;                         // not yet in the shape
  std::vector<PageLocation> piece_locations_;  // of its gathered pages
};

}  // namespace

absl::StatusOr<PlanInputs> FillPlanInputs(const StepPlan& plan, const PlanInputsOptions& options,
                                          const std::vector<std::optional<SequenceState>>& slots,
                                          const PageTableMirror& tables, const StepInputs& inputs) {
  return Filler(plan, options, slots, tables, inputs).Fill();
}

}  // namespace heddle
