#include "runtime/step_plan.h"

#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Every field differs from its default.
StepPlan FullPlan() {
  SlotAdmission admission;
  admission.batch_slot = 3;
  admission.params.max_tokens = std::nullopt;
  admission.params.min_tokens = 2;
  admission.params.temperature = 0.7;
  admission.params.top_k = 40;
  admission.params.top_p = 0.9;
  admission.params.min_p = 0.05;
  admission.params.repetition_penalty = 1.1;
  admission.params.presence_penalty = -0.5;
  admission.params.frequency_penalty = 0.25;
  admission.params.seed = 0xFFFFFFFFFFFFFFFF;
  admission.params.n = 4;
  admission.params.logprobs = 5;
  admission.params.ignore_eos = true;
  admission.params.stop = {"", "\n\n", std::string("a\0b", 3)};
  admission.params.stop_token_ids = {7, 2147483647};
  admission.params.skip_special_tokens = false;
  admission.params.prompt_logprobs = true;
  admission.params.prompt_logits = true;
  admission.seed = 0x0123456789ABCDEF;
  admission.prompt_length = 2;
  admission.token_ids = {1, 2, -3};

  StepPlan plan;
  plan.epoch = uint64_t{1} << 40;
  plan.shutdown = true;
  plan.released_slots = {1, 9};
  plan.admissions = {admission, SlotAdmission{}};
  plan.page_deltas = {
      {.batch_slot = 3, .reset = true, .num_dropped_front = 1, .appended = {{1, 5}, {0, 6}}},
      {.batch_slot = 4, .reset = false, .num_dropped_front = 0, .appended = {}}};
  plan.page_ops = {{.kind = PageOp::Kind::kCopy, .source = {0, 2}, .target = {0, 8}}};
  plan.rows = {{.batch_slot = 3, .query_length = 2, .first_position = 7, .sample = true}};
  plan.has_digest = true;
  plan.page_table_digest = 0xFEDCBA9876543210;
  return plan;
}

TEST(StepPlanTest, ComesBackAsItWas) {
  const std::string bytes = SerializeStepPlan(FullPlan());
  const auto parsed = ParseStepPlan(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->epoch, uint64_t{1} << 40);
  EXPECT_TRUE(parsed->shutdown);
  EXPECT_THAT(parsed->released_slots, ElementsAre(1, 9));
  ASSERT_EQ(parsed->admissions.size(), 2u);
  const SlotAdmission& admission = parsed->admissions[0];
  EXPECT_EQ(admission.batch_slot, 3);
  EXPECT_EQ(admission.seed, 0x0123456789ABCDEFu);
  EXPECT_EQ(admission.prompt_length, 2);
  EXPECT_THAT(admission.token_ids, ElementsAre(1, 2, -3));
  const SamplingParams& params = admission.params;
  EXPECT_EQ(params.max_tokens, std::nullopt);
  EXPECT_EQ(params.min_tokens, 2);
  EXPECT_EQ(params.temperature, 0.7);
  EXPECT_EQ(params.top_k, 40);
  EXPECT_EQ(params.top_p, 0.9);
  EXPECT_EQ(params.min_p, 0.05);
  EXPECT_EQ(params.repetition_penalty, 1.1);
  EXPECT_EQ(params.presence_penalty, -0.5);
  EXPECT_EQ(params.frequency_penalty, 0.25);
  EXPECT_EQ(params.seed, 0xFFFFFFFFFFFFFFFF);
  EXPECT_EQ(params.n, 4);
  EXPECT_EQ(params.logprobs, 5);
  EXPECT_TRUE(params.ignore_eos);
  EXPECT_THAT(params.stop, ElementsAre("", "\n\n", std::string("a\0b", 3)));
  EXPECT_THAT(params.stop_token_ids, ElementsAre(7, 2147483647));
  EXPECT_FALSE(params.skip_special_tokens);
  EXPECT_TRUE(params.prompt_logprobs);
  EXPECT_TRUE(params.prompt_logits);
  EXPECT_EQ(parsed->admissions[1].params.max_tokens, 16);
  ASSERT_EQ(parsed->page_deltas.size(), 2u);
  EXPECT_EQ(parsed->page_deltas[0].batch_slot, 3);
  EXPECT_TRUE(parsed->page_deltas[0].reset);
  EXPECT_EQ(parsed->page_deltas[0].num_dropped_front, 1);
  EXPECT_THAT(parsed->page_deltas[0].appended, ElementsAre(PageLocation{1, 5}, PageLocation{0, 6}));
  ASSERT_EQ(parsed->page_ops.size(), 1u);
  EXPECT_EQ(parsed->page_ops[0].source, (PageLocation{0, 2}));
  EXPECT_EQ(parsed->page_ops[0].target, (PageLocation{0, 8}));
  ASSERT_EQ(parsed->rows.size(), 1u);
  EXPECT_EQ(parsed->rows[0].batch_slot, 3);
  EXPECT_EQ(parsed->rows[0].query_length, 2);
  EXPECT_EQ(parsed->rows[0].first_position, 7);
  EXPECT_TRUE(parsed->rows[0].sample);
  EXPECT_TRUE(parsed->has_digest);
  EXPECT_EQ(parsed->page_table_digest, 0xFEDCBA9876543210u);
  // A field that one direction forgot would show here.
  EXPECT_EQ(SerializeStepPlan(*parsed), bytes);
}

TEST(StepPlanTest, NumbersAreLittleEndian) {
  StepPlan plan;
  plan.epoch = 0x0102;
  const std::string bytes = SerializeStepPlan(plan);
  EXPECT_EQ(bytes.substr(0, 10), std::string("\x01\x02\x01\0\0\0\0\0\0\0", 10));
}

TEST(StepPlanTest, CutAnywhereItIsRefused) {
  const std::string bytes = SerializeStepPlan(FullPlan());
  for (size_t size = 0; size < bytes.size(); ++size) {
    // A copy of its own, so that a read past the end is seen.
    const std::string cut = bytes.substr(0, size);
    const auto parsed = ParseStepPlan(cut);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST(StepPlanTest, SaysWhatIsWrong) {
  std::string bytes = SerializeStepPlan(FullPlan());
  EXPECT_THAT(std::string(ParseStepPlan(bytes + "xy").status().message()),
              HasSubstr("2 bytes too many"));
  EXPECT_THAT(std::string(ParseStepPlan(bytes.substr(0, bytes.size() - 3)).status().message()),
              HasSubstr("ends 3 bytes short"));
  bytes[0] = 9;
  EXPECT_THAT(std::string(ParseStepPlan(bytes).status().message()),
              HasSubstr("version 9 where 1 is due; all ranks must run the same build"));
  EXPECT_THAT(std::string(ParseStepPlan("").status().message()), HasSubstr("has no bytes"));
}

TEST(StepPlanTest, ACountBeyondTheBytesCostsNothing) {
  std::string bytes = SerializeStepPlan(StepPlan{});
  bytes.replace(1 + 8 + 1, 4, "\xFF\xFF\xFF\xFF");  // of released_slots
  EXPECT_THAT(std::string(ParseStepPlan(bytes).status().message()), HasSubstr("bytes short"));
}

TEST(StepPlanTest, AnyOtherBytesAreRefusedOrHarmless) {
  const std::string bytes = SerializeStepPlan(FullPlan());
  std::mt19937_64 random(11);
  int num_parsed = 0;
  for (int round = 0; round < 5'000; ++round) {
    std::string changed = bytes;
    for (uint64_t i = 0; i < 1 + random() % 3; ++i) {
      changed[1 + random() % (changed.size() - 1)] = static_cast<char>(random());
    }
    const auto parsed = ParseStepPlan(changed);
    if (!parsed.ok()) continue;
    ++num_parsed;
    EXPECT_EQ(SerializeStepPlan(*parsed), changed);
  }
  EXPECT_GT(num_parsed, 0);
}

TEST(PageTableDeltaTest, DropsInFrontAndAppendsBehind) {
  PageTable table;
  ASSERT_TRUE(ApplyPageTableDelta({.batch_slot = 0,
                                   .reset = true,
                                   .num_dropped_front = 2,
                                   .appended = {{0, 1}, {0, 2}, {0, 3}}},
                                  &table)
                  .ok());
  EXPECT_EQ(table.first_page, 2);
  EXPECT_EQ(table.end_page(), 5);
  ASSERT_TRUE(
      ApplyPageTableDelta(
          {.batch_slot = 0, .reset = false, .num_dropped_front = 2, .appended = {{0, 4}}}, &table)
          .ok());
  EXPECT_EQ(table.first_page, 4);
  EXPECT_THAT(table.pages, ElementsAre(PageLocation{0, 3}, PageLocation{0, 4}));
  const PageTable before = table;
  for (const int32_t num_dropped : {3, -1}) {
    const absl::Status status = ApplyPageTableDelta(
        {.batch_slot = 8, .reset = false, .num_dropped_front = num_dropped, .appended = {{0, 9}}},
        &table);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("batch slot 8 has 2 pages, of which ", num_dropped)));
    EXPECT_EQ(table.pages, before.pages);
  }
}

}  // namespace
}  // namespace heddle
