// A step plan as the decoder reads it: order of tokens, pages, pieces of context.
#include "runtime/plan_inputs.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend_registry.h"

namespace heddle {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

constexpr StepLimits kLimits = {.max_tokens = 64,
                                .max_sequences = 8,
                                .max_pages = 64,
                                .max_logit_rows = 8,
                                .max_piece_tokens = 8,
                                .max_pieces = 32,
                                .max_piece_pages = 16};

// Slots of a batch whose sequences have as many prompt and output tokens as given; token i of slot
// s is 100 * s + i.
class PlanInputsTest : public testing::Test {
 protected:
  struct Length {
    int64_t prompt, output;
  };

  void SetUp() override {
    backend_ = *CreateBackend({.device = DeviceKind::kCpu, .cpu = {.num_threads = 1}});
    inputs_ = *StepInputs::Create(kLimits, *backend_);
    options_ = {.limits = kLimits, .page_size = 4, .stripe = 0};
  }

  // Page i of slot s is in stripe i % num_stripes and cache slot 10 * s + i; or, if it has a home,
  // all are in stripe homes[s].
  void SetSequences(std::initializer_list<Length> lengths, int num_stripes = 1,
                    const std::vector<int32_t>& homes = {}) {
    tables_ = std::make_unique<PageTableMirror>(8, num_stripes, 1000);
    StepPlan plan;
    int32_t slot = 0;
    for (const auto& [prompt, output] : lengths) {
      std::vector<int32_t> ids(prompt + output);
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(100 * slot + i);
      PageTableDelta delta = {.batch_slot = slot, .reset = true};
      for (int32_t page = 0; page * 4 < prompt + output; ++page) {
        const int32_t stripe = homes.empty() ? page % num_stripes : homes[slot];
        delta.appended.push_back({stripe, 10 * slot + page});
      }
      plan.page_deltas.push_back(delta);
      slots_.emplace_back(std::in_place, SamplingParams(), 0, std::move(ids), prompt);
      ++slot;
    }
    slots_.resize(8);
    ASSERT_TRUE(tables_->Apply(plan).ok());
  }

  absl::StatusOr<PlanInputs> Fill(std::vector<PlanRow> rows) {
    StepPlan plan;
    plan.rows = std::move(rows);
    return FillPlanInputs(plan, options_, slots_, *tables_, inputs_);
  }

  template <typename T>
  static std::vector<T> First(const StepArray<T>& array, int64_t count) {
    return {array.host().begin(), array.host().begin() + count};
  }

  std::unique_ptr<Backend> backend_;
  StepInputs inputs_;
  PlanInputsOptions options_;
  std::vector<std::optional<SequenceState>> slots_;
  std::unique_ptr<PageTableMirror> tables_;
};

TEST_F(PlanInputsTest, RowsInThePlansOrder) {
  SetSequences({{5, 2}, {9, 0}});
  const auto filled =
      Fill({{.batch_slot = 0, .query_length = 1, .first_position = 6, .sample = true},
            {.batch_slot = 1, .query_length = 3, .first_position = 4}});
  ASSERT_TRUE(filled.ok()) << filled.status();
  const StepShape& shape = filled->shape;
  EXPECT_EQ(shape.num_tokens, 4);
  EXPECT_EQ(shape.num_absorbed_tokens, 0);
  EXPECT_TRUE(shape.pieces.empty());
  EXPECT_THAT(First(inputs_.token_ids, 4), ElementsAre(6, 104, 105, 106));
  EXPECT_THAT(First(inputs_.positions, 4), ElementsAre(6, 4, 5, 6));
  EXPECT_THAT(First(inputs_.query_starts, 3), ElementsAre(0, 1, 4));
  EXPECT_THAT(First(inputs_.page_starts, 3), ElementsAre(0, 2, 4));
  EXPECT_THAT(First(inputs_.append_slots, 4), ElementsAre(1, 11, 11, 11));
  EXPECT_THAT(First(inputs_.append_offsets, 4), ElementsAre(2, 0, 1, 2));
  const std::vector<PageSpan> pages = First(inputs_.pages, 4);
  EXPECT_EQ(pages[1].num_valid, 3);
  EXPECT_EQ(pages[3].first_position, 4);
  EXPECT_EQ(pages[3].num_valid, 3);
  EXPECT_THAT(First(inputs_.logit_rows, shape.num_logit_rows), ElementsAre(0));
  EXPECT_EQ(filled->rows[1].TokenAt(5), 2);
}

TEST_F(PlanInputsTest, AStripeSeesItsPagesAlone) {
  SetSequences({{10, 0}}, /*num_stripes=*/2);
  options_.stripe = 1;
  ASSERT_TRUE(Fill({{.batch_slot = 0, .query_length = 10}}).ok());
  EXPECT_THAT(First(inputs_.append_slots, 10), ElementsAre(-1, -1, -1, -1, 1, 1, 1, 1, -1, -1));
  EXPECT_THAT(First(inputs_.page_starts, 2), ElementsAre(0, 1));
  EXPECT_EQ(inputs_.pages.host()[0].first_position, 4);
}

// What MLA has generated is computed in latent space, also when it is recomputed after a
// preemption.
TEST_F(PlanInputsTest, GeneratedTokensComeFirst) {
  SetSequences({{6, 0}, {3, 4}, {5, 1}});
  options_.mla = true;
  const auto filled =
      Fill({{.batch_slot = 2, .query_length = 1, .first_position = 5, .sample = true},
            {.batch_slot = 1, .query_length = 7, .first_position = 0, .sample = true},
            {.batch_slot = 0, .query_length = 4, .first_position = 1}});
  ASSERT_TRUE(filled.ok()) << filled.status();
  const StepShape& shape = filled->shape;
  EXPECT_EQ(shape.num_sequences, 4);
  EXPECT_EQ(shape.num_absorbed_sequences, 2);
  EXPECT_EQ(shape.num_absorbed_tokens, 5);
  EXPECT_EQ(shape.num_tokens, 12);
  EXPECT_THAT(First(inputs_.token_ids, 12),
              ElementsAre(205, 103, 104, 105, 106, 100, 101, 102, 1, 2, 3, 4));
  EXPECT_THAT(First(inputs_.query_starts, 5), ElementsAre(0, 1, 5, 8, 12));
  EXPECT_THAT(First(inputs_.logit_rows, shape.num_logit_rows), ElementsAre(0, 4));
  EXPECT_EQ(filled->sampled.size(), 2u);
  EXPECT_EQ(filled->rows[1].TokenAt(0), 5);
  EXPECT_EQ(filled->rows[1].TokenAt(2), 7);
  EXPECT_EQ(filled->rows[1].TokenAt(3), 1);
  EXPECT_EQ(filled->rows[2].TokenAt(4), 11);
  // Contexts of 3 and 5 tokens fill one piece of 8.
  ASSERT_EQ(shape.pieces.size(), 1u);
  EXPECT_EQ(shape.pieces[0].first_sequence, 2);
  EXPECT_EQ(shape.pieces[0].num_sequences, 2);
  EXPECT_EQ(shape.pieces[0].num_tokens, 8);
  EXPECT_TRUE(shape.pieces[0].first && shape.pieces[0].last);
  EXPECT_THAT(First(inputs_.segment_starts, 3), ElementsAre(0, 3, 8));
  EXPECT_THAT(First(inputs_.segment_positions, 2), ElementsAre(0, 0));

  options_.absorb_prompts = true;
  const auto absorbed = Fill({{.batch_slot = 0, .query_length = 1, .first_position = 1}});
  ASSERT_TRUE(absorbed.ok());
  EXPECT_EQ(absorbed->shape.num_absorbed_tokens, 1);
  EXPECT_TRUE(absorbed->shape.pieces.empty());
}

// Pieces hold whole contexts, or a part of one.
TEST_F(PlanInputsTest, LongContextsAreCut) {
  SetSequences({{4, 0}, {19, 0}, {3, 0}, {6, 0}});
  options_.mla = true;
  const auto filled = Fill({{.batch_slot = 0, .query_length = 4},
                            {.batch_slot = 1, .query_length = 2, .first_position = 17},
                            {.batch_slot = 2, .query_length = 3},
                            {.batch_slot = 3, .query_length = 6}});
  ASSERT_TRUE(filled.ok()) << filled.status();
  std::vector<std::vector<int64_t>> pieces;
  for (const ContextPiece& piece : filled->shape.pieces) {
    pieces.push_back({piece.first_sequence, piece.num_sequences, piece.num_tokens, piece.first,
                      piece.last, piece.segment_starts, piece.segment_positions});
  }
  const std::vector<std::vector<int64_t>> expected = {
      {0, 1, 4, 1, 1, 0, 0}, {1, 1, 8, 1, 0, 2, 1}, {1, 1, 8, 0, 0, 4, 2},
      {1, 1, 3, 0, 1, 6, 3}, {2, 1, 3, 1, 1, 8, 4}, {3, 1, 6, 1, 1, 10, 5}};
  EXPECT_THAT(pieces, ElementsAreArray(expected));
  EXPECT_THAT(First(inputs_.segment_starts, 12), ElementsAre(0, 4, 0, 8, 0, 8, 0, 3, 0, 3, 0, 6));
  EXPECT_THAT(First(inputs_.segment_positions, 6), ElementsAre(0, 0, 8, 16, 0, 0));
}

// Pages that earlier steps stored come to all stripes of a group, ordered by stripe.
TEST_F(PlanInputsTest, StoredPagesOfAllStripesAreGathered) {
  SetSequences({{11, 0}, {4, 0}, {13, 0}}, /*num_stripes=*/2);
  options_.mla = true;
  options_.stripe = 1;
  options_.num_stripes = 2;
  options_.limits.max_piece_tokens = 16;
  const auto filled = Fill({{.batch_slot = 0, .query_length = 1, .first_position = 10},
                            {.batch_slot = 1, .query_length = 4},
                            {.batch_slot = 2, .query_length = 2, .first_position = 11}});
  ASSERT_TRUE(filled.ok()) << filled.status();
  const StepShape& shape = filled->shape;
  ASSERT_EQ(shape.pieces.size(), 2u);
  // Of the first sequence pages 0 and 2 are on stripe 0, page 1 on stripe 1; the second has none.
  EXPECT_THAT(shape.pieces[0].pages_per_stripe, ElementsAre(2, 1));
  EXPECT_THAT(shape.pieces[1].pages_per_stripe, ElementsAre(2, 1));
  EXPECT_EQ(shape.pieces[1].page_starts, 3);
  EXPECT_EQ(shape.pieces[1].pages, 3);
  EXPECT_EQ(shape.pieces[1].own_pages, 1);
  EXPECT_THAT(First(inputs_.piece_page_starts, 5), ElementsAre(0, 3, 3, 0, 3));
  std::vector<std::vector<int32_t>> pages;
  for (const PageSpan& page : First(inputs_.piece_pages, shape.num_piece_pages)) {
    pages.push_back({page.slot, page.first_position, page.num_valid});
  }
  const std::vector<std::vector<int32_t>> expected = {{0, 0, 4}, {2, 4, 4}, {1, 8, 2},
                                                      {0, 0, 4}, {2, 4, 4}, {1, 8, 3}};
  EXPECT_THAT(pages, ElementsAreArray(expected));
  EXPECT_THAT(First(inputs_.own_page_sources, shape.num_own_piece_pages), ElementsAre(1, 21));
  EXPECT_THAT(First(inputs_.own_page_targets, shape.num_own_piece_pages), ElementsAre(2, 2));
}

// Tokens in order of their ranks; attention sees those of its own rank alone.
TEST_F(PlanInputsTest, DataParallelRanksSeeTheirOwnRows) {
  // Slots 0 and 2 are on rank 1, slot 1 on rank 0, slot 3 on rank 3; rank 2 has nothing.
  SetSequences({{5, 1}, {3, 2}, {6, 0}, {2, 0}}, /*num_stripes=*/4, {1, 0, 1, 3});
  options_.mla = true;
  options_.num_stripes = 4;
  options_.dp_attention = true;
  const std::vector<PlanRow> rows = {
      {.batch_slot = 2, .query_length = 4, .first_position = 2, .sample = true},
      {.batch_slot = 0, .query_length = 1, .first_position = 5, .sample = true},
      {.batch_slot = 1, .query_length = 3, .first_position = 2, .sample = true},
      {.batch_slot = 3, .query_length = 2}};
  const auto fill = [&](int rank) {
    options_.stripe = rank;
    absl::StatusOr<PlanInputs> filled = Fill(rows);
    EXPECT_TRUE(filled.ok()) << filled.status();
    // What all ranks see alike.
    EXPECT_EQ(filled->shape.num_tokens, 10);
    EXPECT_THAT(filled->shape.tokens_per_rank, ElementsAre(3, 5, 0, 2));
    EXPECT_THAT(First(inputs_.token_ids, 10),
                ElementsAre(103, 104, 102, 5, 202, 203, 204, 205, 300, 301));
    EXPECT_THAT(First(inputs_.logit_rows, filled->shape.num_logit_rows), ElementsAre(7, 3, 1));
    EXPECT_EQ(filled->rows[2].TokenAt(2), 2);
    EXPECT_EQ(filled->rows[3].TokenAt(1), 9);
    return filled->shape;
  };
  const StepShape first = fill(0);
  EXPECT_EQ(first.own_tokens, (Range{0, 3}));
  EXPECT_EQ(first.num_absorbed_tokens, 2);
  EXPECT_EQ(first.num_sequences, 2);
  EXPECT_THAT(First(inputs_.positions, 3), ElementsAre(3, 4, 2));
  EXPECT_THAT(First(inputs_.append_slots, 3), ElementsAre(10, 11, 10));

  const StepShape second = fill(1);
  EXPECT_EQ(second.own_tokens, (Range{3, 8}));
  EXPECT_EQ(second.num_absorbed_tokens, 1);
  EXPECT_EQ(second.num_absorbed_sequences, 1);
  EXPECT_THAT(First(inputs_.positions, 5), ElementsAre(5, 2, 3, 4, 5));
  EXPECT_THAT(First(inputs_.query_starts, 3), ElementsAre(0, 1, 5));
  EXPECT_THAT(First(inputs_.page_starts, 3), ElementsAre(0, 2, 4));
  ASSERT_EQ(second.pieces.size(), 1u);
  EXPECT_EQ(second.pieces[0].first_sequence, 1);
  EXPECT_EQ(second.pieces[0].num_tokens, 6);
  EXPECT_EQ(second.num_piece_pages, 0) << "nobody else has pages of it";

  const StepShape third = fill(2);
  EXPECT_TRUE(third.own_tokens.empty());
  EXPECT_EQ(third.num_sequences, 0);
  EXPECT_TRUE(third.pieces.empty());

  const StepShape fourth = fill(3);
  EXPECT_EQ(fourth.own_tokens, (Range{8, 10}));
  EXPECT_EQ(fourth.num_absorbed_tokens, 0);
}

TEST_F(PlanInputsTest, ASequenceOfTwoRanksIsRefused) {
  SetSequences({{5, 0}}, /*num_stripes=*/2);
  options_.num_stripes = 2;
  options_.dp_attention = true;
  EXPECT_THAT(std::string(Fill({{.batch_slot = 0, .query_length = 5}}).status().message()),
              HasSubstr("slot 0 has pages on rank 0 and on rank 1"));
}

// Without a cache there are no latents to attend to: everything is expanded.
TEST_F(PlanInputsTest, NothingIsAbsorbedWithoutACache) {
  SetSequences({{3, 4}});
  options_.mla = true;
  options_.has_cache = false;
  const auto filled = Fill({{.batch_slot = 0, .query_length = 7, .sample = true}});
  ASSERT_TRUE(filled.ok());
  EXPECT_EQ(filled->shape.num_absorbed_tokens, 0);
  EXPECT_EQ(filled->shape.num_pages, 0);
  ASSERT_EQ(filled->shape.pieces.size(), 1u);
  EXPECT_EQ(filled->shape.pieces[0].num_tokens, 7);
}

TEST_F(PlanInputsTest, RefusesPlansThatCannotFollow) {
  SetSequences({{5, 0}});
  const auto error = [&](PlanRow row) { return std::string(Fill({row}).status().message()); };
  EXPECT_THAT(error({.batch_slot = 1, .query_length = 1}), HasSubstr("batch slot 1 is empty"));
  EXPECT_THAT(error({.batch_slot = 9, .query_length = 1}), HasSubstr("batch slot 9 is empty"));
  EXPECT_THAT(error({.batch_slot = 0, .query_length = 6}),
              HasSubstr("row of positions 0 to 6 in a sequence of 5"));
  EXPECT_THAT(error({.batch_slot = 0, .query_length = 4, .sample = true}),
              HasSubstr("row of positions 0 to 4"));
  options_.limits.max_tokens = 4;
  EXPECT_THAT(error({.batch_slot = 0, .query_length = 5}), HasSubstr("above the limits"));
}

}  // namespace
}  // namespace heddle
