#include "kernels/kv_append/kv_append.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/cpu_device.h"

namespace heddle {
namespace {

using testing::HasSubstr;

// A plane of `num_slots` slots, filled with bytes 0xee, and its shadow: what it should hold.
class TestPlane {
 public:
  TestPlane(CpuDevice& device, DType dtype, int64_t num_slots, int64_t heads, int64_t head_elements)
      : shadow_(num_slots * (heads * (head_elements + 3) + 5) * BlockBytes(dtype), 0xee),
        view_{device.Upload(shadow_), dtype, heads * (head_elements + 3) + 5, head_elements + 3} {}

  const KvPlane& view() const { return view_; }

  void ExpectElement(int64_t slot, int64_t head, int64_t index, float value) {
    uint8_t* target = ShadowAt(slot, head) + index * BlockBytes(view_.dtype);
    if (view_.dtype == DType::kFloat32) {
      std::memcpy(target, &value, 4);
    } else {
      const uint16_t bits =
          view_.dtype == DType::kBFloat16 ? FloatToBFloat16(value) : FloatToFloat16(value);
      std::memcpy(target, &bits, 2);
    }
  }
  // Stores a value, and expects it.
  void Set(int64_t slot, int64_t head, int64_t index, float value) {
    ExpectElement(slot, head, index, value);
    const int64_t offset = ShadowAt(slot, head) + index * BlockBytes(view_.dtype) - shadow_.data();
    std::memcpy(static_cast<uint8_t*>(view_.data) + offset, &shadow_[offset],
                BlockBytes(view_.dtype));
  }
  // From the first head to the end of the last.
  int64_t PageBytes(int64_t heads) const {
    return std::max<int64_t>(heads * view_.head_stride - 3, 0) * BlockBytes(view_.dtype);
  }
  void ExpectCopy(int64_t source_slot, int64_t target_slot, int64_t heads, int64_t elements) {
    for (int64_t head = 0; head < heads; ++head) {
      std::memcpy(ShadowAt(target_slot, head), ShadowAt(source_slot, head),
                  elements * BlockBytes(view_.dtype));
    }
  }
  void ExpectMatch() const {
    EXPECT_EQ(std::memcmp(view_.data, shadow_.data(), shadow_.size()), 0);
  }

 private:
  uint8_t* ShadowAt(int64_t slot, int64_t head) {
    return shadow_.data() +
           (slot * view_.slot_stride + head * view_.head_stride) * BlockBytes(view_.dtype);
  }

  std::vector<uint8_t> shadow_;
  KvPlane view_;
};

TEST(KvAppend, WritesItsTokensAndNothingElse) {
  std::mt19937 random(1);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t page_size : {1, 3, 16, 64, 128}) {
      for (const int64_t heads : {1, 3}) {
        for (const int64_t head_dim : {1, 8, 33, 64}) {
          SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " page ", page_size, " heads ",
                                    heads, "x", head_dim));
          CpuDevice device(2);
          constexpr int64_t kSlots = 200;
          const int64_t width = heads * head_dim;
          TestPlane k_plane(device, dtype, kSlots, heads, head_dim * page_size);
          TestPlane v_plane(device, dtype, kSlots, heads, head_dim * page_size);
          // Tokens fill some pages in order, every ninth belongs to another rank.
          constexpr int64_t kTokens = 150;
          const std::vector<float> k = RandomFloats(kTokens * width, random);
          const std::vector<float> v = RandomFloats(kTokens * (width + 2), random);
          std::vector<int32_t> slots, offsets;
          for (int64_t token = 0; token < kTokens; ++token) {
            slots.push_back(token % 9 == 8 ? -1 : static_cast<int32_t>(token / page_size + 7));
            offsets.push_back(static_cast<int32_t>(token % page_size));
            if (slots.back() < 0) continue;
            for (int64_t head = 0; head < heads; ++head) {
              for (int64_t i = 0; i < head_dim; ++i) {
                k_plane.ExpectElement(slots.back(), head, i * page_size + offsets.back(),
                                      k[token * width + head * head_dim + i]);
                v_plane.ExpectElement(slots.back(), head, offsets.back() * head_dim + i,
                                      v[token * (width + 2) + head * head_dim + i]);
              }
            }
          }
          KvAppendArgs args;
          args.k = FloatMatrix(static_cast<const float*>(device.Upload(k)), kTokens, width);
          args.v = {device.Upload(v), DType::kFloat32, kTokens, width, width + 2};
          args.k_plane = k_plane.view();
          args.v_plane = v_plane.view();
          args.num_kv_heads = heads;
          args.head_dim = head_dim;
          args.page_size = page_size;
          args.slots = device.Upload(slots);
          args.page_offsets = device.Upload(offsets);
          ASSERT_TRUE(device.kernels().kv_append(args, device.stream()).ok());
          device.Synchronize();
          k_plane.ExpectMatch();
          v_plane.ExpectMatch();
        }
      }
    }
  }
}

TEST(KvAppend, ShardsWithoutHeadsOrTokensDoNothing) {
  CpuDevice device;
  const int32_t slot = 0;
  KvAppendArgs args;
  args.head_dim = 8;
  args.page_size = 16;
  args.k = args.v = FloatMatrix(static_cast<const float*>(nullptr), 1, 0);
  args.slots = args.page_offsets = &slot;
  EXPECT_TRUE(device.kernels().kv_append(args, device.stream()).ok());
  args.k = args.v = FloatMatrix(static_cast<const float*>(nullptr), 0, 0);
  args.slots = args.page_offsets = nullptr;
  EXPECT_TRUE(device.kernels().kv_append(args, device.stream()).ok());
  device.Synchronize();
}

TEST(KvAppend, RefusesArgumentsByName) {
  CpuDevice device;
  float memory[64] = {};
  const int32_t zero = 0;
  KvAppendArgs good;
  good.k = good.v = FloatMatrix(static_cast<const float*>(memory), 1, 4);
  good.k_plane = good.v_plane = {memory, DType::kFloat32, 16, 8};
  good.num_kv_heads = 2;
  good.head_dim = 2;
  good.page_size = 4;
  good.slots = good.page_offsets = &zero;
  const auto error = [&](auto spoil) {
    KvAppendArgs args = good;
    spoil(args);
    absl::Status status = device.kernels().kv_append(args, device.stream());
    if (status.ok()) status = device.stream().Synchronize();
    return std::string(status.message());
  };
  EXPECT_EQ(error([](KvAppendArgs&) {}), "");
  EXPECT_THAT(error([](KvAppendArgs& a) { a.k.cols = 5; }), HasSubstr("kv_append: k"));
  EXPECT_THAT(error([](KvAppendArgs& a) { a.v.rows = 2; }), HasSubstr("v is [2, 4], not [1, 4]"));
  EXPECT_THAT(error([](KvAppendArgs& a) { a.k_plane.dtype = DType::kQ8_0; }),
              HasSubstr("k_plane is Q8_0"));
  EXPECT_THAT(error([](KvAppendArgs& a) { a.v_plane.head_stride = 7; }),
              HasSubstr("v_plane has head stride 7"));
  EXPECT_THAT(error([](KvAppendArgs& a) { a.v_plane.slot_stride = 15; }),
              HasSubstr("slot stride 15"));
  EXPECT_THAT(error([](KvAppendArgs& a) { a.page_size = 0; }), HasSubstr("pages of 0 tokens"));
  EXPECT_THAT(error([](KvAppendArgs& a) { a.slots = nullptr; }), HasSubstr("slots is null"));
  const int32_t four = 4;
  EXPECT_THAT(error([&](KvAppendArgs& a) { a.page_offsets = &four; }),
              HasSubstr("token 0 has offset 4 in a page of 4"));
}

TEST(KvCopyPages, CopiesWholePages) {
  std::mt19937 random(2);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t heads : {0, 1, 3}) {
      CpuDevice device(2);
      constexpr int64_t kElements = 33 * 16;
      TestPlane plane(device, dtype, 90, heads, kElements);
      std::vector<int32_t> sources, targets;
      for (int32_t i = 0; i < 40; ++i) {
        sources.push_back(i / 2);  // one source may have two targets
        targets.push_back(50 + (i * 7) % 40);
        for (int64_t head = 0; head < heads; ++head) {
          plane.Set(sources.back(), head, 5, static_cast<float>(random() % 1000));
        }
      }
      for (size_t i = 0; i < sources.size(); ++i) {
        plane.ExpectCopy(sources[i], targets[i], heads, kElements);
      }
      const KvCopyPagesArgs args{.source = plane.view(),
                                 .target = plane.view(),
                                 .bytes_per_page = plane.PageBytes(heads),
                                 .source_slots = device.Upload(sources),
                                 .target_slots = device.Upload(targets),
                                 .num_pages = static_cast<int64_t>(sources.size())};
      ASSERT_TRUE(device.kernels().kv_copy_pages(args, device.stream()).ok());
      device.Synchronize();
      plane.ExpectMatch();
    }
  }
}

TEST(KvCopyPages, RefusesArgumentsByName) {
  CpuDevice device;
  float memory[64] = {};
  const int32_t slots[] = {0, 1};
  const KvCopyPagesArgs good{.source = {memory, DType::kFloat32, 16, 8},
                             .target = {memory, DType::kFloat32, 16, 8},
                             .bytes_per_page = 64,
                             .source_slots = slots,
                             .target_slots = slots + 1,
                             .num_pages = 1};
  const auto error = [&](auto spoil) {
    KvCopyPagesArgs args = good;
    spoil(args);
    return std::string(device.kernels().kv_copy_pages(args, device.stream()).message());
  };
  EXPECT_EQ(error([](KvCopyPagesArgs&) {}), "");
  EXPECT_THAT(error([](KvCopyPagesArgs& a) { a.source_slots = nullptr; }),
              HasSubstr("kv_copy_pages: source_slots is null"));
  EXPECT_THAT(error([](KvCopyPagesArgs& a) { a.num_pages = -1; }), HasSubstr("-1 pages"));
  EXPECT_THAT(error([](KvCopyPagesArgs& a) { a.bytes_per_page = 65; }),
              HasSubstr("pages of 65 bytes in slots of 64"));
  EXPECT_THAT(error([](KvCopyPagesArgs& a) { a.source.data = nullptr; }),
              HasSubstr("source is null"));
}

}  // namespace
}  // namespace heddle
