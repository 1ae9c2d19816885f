#include "cache/kv_layout.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using testing::HasSubstr;

std::string ErrorOf(const absl::StatusOr<KvLayout>& layout) {
  return layout.ok() ? "ok" : std::string(layout.status().message());
}

TEST(KvLayoutTest, GroupedQueries) {
  const auto layout = KvLayout::ForGqa(16, DType::kBFloat16, 3, 2, 64, {0, 0, 0});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->num_layers(), 3);
  ASSERT_EQ(layout->groups().size(), 1u);
  ASSERT_EQ(layout->GroupOf(2).planes.size(), 2u);
  for (const KvPlaneLayout& plane : layout->GroupOf(2).planes) {
    EXPECT_EQ(plane.first_head, 3);
    EXPECT_EQ(plane.head_stride, 64 * 16);
    EXPECT_EQ(plane.slot_stride, 2 * 64 * 16);
    EXPECT_EQ(plane.bytes_per_page, 2 * 64 * 16 * 2);
  }
  EXPECT_EQ(layout->bytes_per_page(), 3 * 2 * (2 * 64 * 16 * 2));
  // 2 (K and V) * heads * head_dim * sizeof, a layer.
  EXPECT_EQ(layout->bytes_per_token(), 3 * 2 * 2 * 64 * 2);
}

TEST(KvLayoutTest, ARankWithoutHeadsStoresNothing) {
  const auto layout = KvLayout::ForGqa(16, DType::kFloat32, 2, 0, 64, {0, 0});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->bytes_per_page(), 0);
  EXPECT_EQ(layout->bytes_per_token(), 0);
}

// (kv_lora_rank + qk_rope_head_dim) * sizeof a token and layer, whatever the number of heads.
TEST(KvLayoutTest, LatentPlanesOfTheirOwnDtype) {
  const auto mla = [](DType latent, DType rope) {
    return KvLayout::Create(
        64, {{.layers = {0, 1, 2},
              .window = 0,
              .planes = {
                  {.kind = KvPlaneKind::kLatent, .dtype = latent, .num_heads = 1, .head_dim = 16},
                  {.kind = KvPlaneKind::kRope, .dtype = rope, .num_heads = 1, .head_dim = 4}}}});
  };
  EXPECT_EQ(mla(DType::kFloat32, DType::kFloat32)->bytes_per_token(), 20 * 4 * 3);
  EXPECT_EQ(mla(DType::kBFloat16, DType::kFloat32)->bytes_per_token(), (16 * 2 + 4 * 4) * 3);
}

TEST(KvLayoutTest, Latents) {
  const auto layout = KvLayout::ForMla(64, DType::kBFloat16, 1, 512, 64, 27);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->num_layers(), 27);
  EXPECT_EQ(layout->RetentionWindow(), 0);
  EXPECT_EQ(layout->bytes_per_token(), (512 + 64) * 2 * 27);
  EXPECT_EQ(layout->bytes_per_page(), 64 * (512 + 64) * 2 * 27);
  ASSERT_EQ(layout->groups().size(), 1u);
  ASSERT_EQ(layout->GroupOf(26).planes.size(), 2u);
  const KvPlaneLayout& latent = layout->GroupOf(26).planes[0];
  const KvPlaneLayout& rope = layout->GroupOf(26).planes[1];
  EXPECT_EQ(latent.kind, KvPlaneKind::kLatent);
  EXPECT_EQ(latent.slot_stride, 64 * 512);
  EXPECT_EQ(rope.kind, KvPlaneKind::kRope);
  EXPECT_EQ(rope.slot_stride, 64 * 64);
  EXPECT_EQ(KvLayout::ForMla(1, DType::kFloat32, 1, 16, 4, 2)->bytes_per_token(), (16 + 4) * 4 * 2);
  EXPECT_EQ(KvLayout::ForMla(1, DType::kFloat32, 0, 16, 4, 2)->bytes_per_token(), 0);
  EXPECT_THAT(ErrorOf(KvLayout::ForMla(16, DType::kFloat32, 1, 0, 4, 2)),
              HasSubstr("plane 0 of group 0: first head 0, 1 heads of dimension 0"));
  EXPECT_THAT(ErrorOf(KvLayout::ForMla(16, DType::kQ8_0, 1, 16, 4, 2)), HasSubstr("dtype Q8_0"));
}

TEST(KvLayoutTest, LayersOfOneWindowFormAGroup) {
  const auto layout = KvLayout::ForGqa(4, DType::kFloat32, 0, 1, 8, {32, 64, 32, 64});
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->groups().size(), 2u);
  EXPECT_THAT(layout->groups()[0].layers, testing::ElementsAre(0, 2));
  EXPECT_EQ(layout->GroupOf(3).window, 64);
  // A page serves all layers: it stays as long as the widest window sees it.
  EXPECT_EQ(layout->RetentionWindow(), 64);
  EXPECT_EQ(KvLayout::ForGqa(4, DType::kFloat32, 0, 1, 8, {32, 0})->RetentionWindow(), 0);
}

TEST(KvLayoutTest, SaysWhatIsWrong) {
  EXPECT_THAT(ErrorOf(KvLayout::ForGqa(0, DType::kFloat32, 0, 1, 8, {0})),
              HasSubstr("page size is 0; it must be at least 1"));
  EXPECT_THAT(ErrorOf(KvLayout::ForGqa(16, DType::kQ8_0, 0, 1, 8, {0})),
              HasSubstr("dtype Q8_0; pages hold float32, bfloat16 or float16"));
  EXPECT_THAT(ErrorOf(KvLayout::ForGqa(16, DType::kFloat32, 0, -1, 8, {0})), HasSubstr("-1 heads"));
  EXPECT_THAT(ErrorOf(KvLayout::ForGqa(16, DType::kFloat32, 0, 1, 8, {-4})),
              HasSubstr("window -4"));
  EXPECT_THAT(ErrorOf(KvLayout::Create(16, {{.layers = {0, 1}, .window = 0, .planes = {}},
                                            {.layers = {1}, .window = 0, .planes = {}}})),
              HasSubstr("layer 1 is in two groups"));
  EXPECT_THAT(ErrorOf(KvLayout::Create(16, {{.layers = {0, 2}, .window = 0, .planes = {}}})),
              HasSubstr("layer 1 is in no group"));
}

TEST(KvLayoutTest, SizesThatOverflowAreRefused) {
  const int64_t huge = int64_t{1} << 40;
  EXPECT_THAT(ErrorOf(KvLayout::ForGqa(huge, DType::kFloat32, 0, 1, huge, {0})),
              HasSubstr("plane 0 of group 0: its bytes overflow 64 bits"));
  EXPECT_THAT(ErrorOf(KvLayout::ForGqa(huge, DType::kFloat32, 0, 1, int64_t{1} << 20,
                                       std::vector<int64_t>(4, 0))),
              HasSubstr("overflow 64 bits"));
}

}  // namespace
}  // namespace heddle
