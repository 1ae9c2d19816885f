#include "runtime/page_table_mirror.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

StepPlan PlanOf(PageTableDelta delta) {
  StepPlan plan;
  plan.page_deltas = {std::move(delta)};
  return plan;
}

TEST(PageTableMirror, FollowsDeltas) {
  PageTableMirror mirror(2, 1, 8);
  ASSERT_TRUE(
      mirror.Apply(PlanOf({.batch_slot = 1, .reset = true, .appended = {{0, 3}, {0, 5}}})).ok());
  EXPECT_THAT(mirror.table(1).pages, ElementsAre(PageLocation{0, 3}, PageLocation{0, 5}));
  const uint64_t digest = mirror.Digest();
  EXPECT_NE(digest, PageTableMirror(2, 1, 8).Digest());
  ASSERT_TRUE(
      mirror.Apply(PlanOf({.batch_slot = 1, .num_dropped_front = 1, .appended = {{0, 0}}})).ok());
  EXPECT_EQ(mirror.table(1).first_page, 1);
  EXPECT_THAT(mirror.table(1).pages, ElementsAre(PageLocation{0, 5}, PageLocation{0, 0}));
  EXPECT_NE(mirror.Digest(), digest);
  StepPlan release;
  release.released_slots = {1};
  ASSERT_TRUE(mirror.Apply(release).ok());
  EXPECT_THAT(mirror.table(1).pages, IsEmpty());
  EXPECT_EQ(mirror.Digest(), PageTableMirror(2, 1, 8).Digest());
}

TEST(PageTableMirror, RefusesWhatDoesNotFollow) {
  PageTableMirror mirror(2, 1, 8);
  const auto refusal = [&](PageTableDelta delta) {
    const absl::Status status = mirror.Apply(PlanOf(std::move(delta)));
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({.batch_slot = 2, .appended = {{0, 0}}}), HasSubstr("batch slot 2"));
  EXPECT_THAT(refusal({.batch_slot = -1}), HasSubstr("batch slot -1"));
  EXPECT_THAT(refusal({.batch_slot = 0, .appended = {{0, 8}}}), HasSubstr("(0, 8)"));
  EXPECT_THAT(refusal({.batch_slot = 0, .appended = {{1, 0}}}), HasSubstr("(1, 0)"));
  EXPECT_THAT(refusal({.batch_slot = 0, .num_dropped_front = 1}), HasSubstr("step plan"));
  StepPlan release;
  release.released_slots = {5};
  EXPECT_FALSE(mirror.Apply(release).ok());
}

}  // namespace
}  // namespace heddle
