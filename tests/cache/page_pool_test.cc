#include "cache/page_pool.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"

namespace heddle {
namespace {

using testing::HasSubstr;

class PagePoolTest : public testing::TestWithParam<CpuStreamMode> {
 protected:
  PagePoolTest()
      : backend_(CreateCpuBackend({.num_threads = 2, .stream_mode = GetParam()})),
        stream_(*backend_->CreateStream()) {}

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
};

// Element `index` of a page of a plane.
float& At(const KvPlane& plane, int64_t slot, int64_t index) {
  return static_cast<float*>(plane.data)[slot * plane.slot_stride + index];
}

TEST_P(PagePoolTest, PlanesAreApartAndAsLarge) {
  const KvLayout layout = *KvLayout::ForGqa(4, DType::kFloat32, 1, 2, 8, {0, 0, 16});
  auto pool = PagePool::Create(*backend_, layout, 5);
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(pool->bytes(), 5 * layout.bytes_per_page());
  // Every element of every plane keeps its own value.
  const int64_t page_elements = 2 * 8 * 4;
  const auto value = [&](int64_t layer, KvPlaneKind kind, int64_t slot, int64_t index) {
    return static_cast<float>(
        ((layer * 2 + static_cast<int64_t>(kind)) * 5 + slot) * page_elements + index);
  };
  for (const bool write : {true, false}) {
    for (int64_t layer = 0; layer < 3; ++layer) {
      for (const KvPlaneKind kind : {KvPlaneKind::kKey, KvPlaneKind::kValue}) {
        const KvPlane plane = pool->Plane(layer, kind);
        EXPECT_EQ(plane.dtype, DType::kFloat32);
        EXPECT_EQ(plane.head_stride, 8 * 4);
        ASSERT_EQ(plane.slot_stride, page_elements);
        for (int64_t slot = 0; slot < 5; ++slot) {
          for (int64_t index = 0; index < page_elements; ++index) {
            if (write) {
              At(plane, slot, index) = value(layer, kind, slot, index);
            } else {
              ASSERT_EQ(At(plane, slot, index), value(layer, kind, slot, index));
            }
          }
        }
      }
    }
  }
}

TEST_P(PagePoolTest, CopiesPagesInAllPlanesOfAllLayers) {
  for (const KvLayout& layout : {*KvLayout::ForGqa(4, DType::kFloat32, 0, 2, 8, {0, 16}),
                                 *KvLayout::ForMla(4, DType::kFloat32, 1, 20, 6, 2)}) {
    auto pool = PagePool::Create(*backend_, layout, 6);
    ASSERT_TRUE(pool.ok()) << pool.status();
    const auto each_plane = [&](auto visit) {
      for (int64_t layer = 0; layer < 2; ++layer) {
        for (const KvPlaneLayout& plane : layout.GroupOf(layer).planes) {
          visit(layer + 10 * static_cast<int64_t>(plane.kind), pool->Plane(layer, plane.kind));
        }
      }
    };
    each_plane([](int64_t salt, const KvPlane& plane) {
      for (int64_t index = 0; index < 6 * plane.slot_stride; ++index) {
        At(plane, 0, index) = static_cast<float>(salt * 10'000 + index);
      }
    });
    DeviceBuffer lists = *backend_->Allocate(4 * sizeof(int32_t));
    const std::vector<int32_t> slots = {1, 5, 3, 0};  // 1 → 3, 5 → 0
    std::ranges::copy(slots, lists.as<int32_t>());
    ASSERT_TRUE(pool->CopyPages(lists.as<int32_t>(), lists.as<int32_t>() + 2, 2, *stream_).ok());
    ASSERT_TRUE(stream_->Synchronize().ok());
    each_plane([](int64_t salt, const KvPlane& plane) {
      const std::vector<int64_t> expected = {5, 1, 2, 1, 4, 5};
      for (int64_t slot = 0; slot < 6; ++slot) {
        for (int64_t index = 0; index < plane.slot_stride; ++index) {
          ASSERT_EQ(At(plane, slot, index),
                    static_cast<float>(salt * 10'000 + expected[slot] * plane.slot_stride + index));
        }
      }
    });
  }
}

TEST_P(PagePoolTest, ARankWithoutHeadsHasNoBytes) {
  auto pool = PagePool::Create(*backend_, *KvLayout::ForGqa(16, DType::kBFloat16, 3, 0, 64, {0, 0}),
                               1'000'000'000);
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(pool->bytes(), 0);
  EXPECT_EQ(pool->Plane(1, KvPlaneKind::kValue).data, nullptr);
  EXPECT_TRUE(pool->Fill(0xFF, *stream_).ok());
  const std::vector<int32_t> slots = {0, 1};
  EXPECT_TRUE(pool->CopyPages(&slots[0], &slots[1], 1, *stream_).ok());
  EXPECT_TRUE(stream_->Synchronize().ok());
}

TEST_P(PagePoolTest, FillMakesEveryNumberANan) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    auto pool = PagePool::Create(*backend_, *KvLayout::ForGqa(3, dtype, 0, 1, 5, {0}), 4);
    ASSERT_TRUE(pool.ok()) << pool.status();
    ASSERT_TRUE(pool->Fill(0xFF, *stream_).ok());
    ASSERT_TRUE(stream_->Synchronize().ok());
    const KvPlane plane = pool->Plane(0, KvPlaneKind::kValue);
    for (int64_t i = 0; i < 4 * plane.slot_stride; ++i) {
      const auto* halves = static_cast<const uint16_t*>(plane.data);
      const float number = dtype == DType::kFloat32    ? static_cast<const float*>(plane.data)[i]
                           : dtype == DType::kBFloat16 ? BFloat16ToFloat(halves[i])
                                                       : Float16ToFloat(halves[i]);
      ASSERT_TRUE(std::isnan(number)) << DTypeName(dtype) << " " << i;
    }
  }
}

TEST_P(PagePoolTest, APoolThatCannotBeIsRefusedWithItsSize) {
  const KvLayout layout = *KvLayout::ForGqa(16, DType::kFloat32, 0, 8, 128, {0, 0});
  EXPECT_THAT(std::string(PagePool::Create(*backend_, layout, 0).status().message()),
              HasSubstr("number of KV pages is 0; it must be at least 1"));
  const auto short_of_memory = PagePool::Create(*backend_, layout, int64_t{1} << 40);
  EXPECT_EQ(short_of_memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(short_of_memory.status().message()),
              HasSubstr("KV pages of layer 0 (1099511627776 pages, "));
  EXPECT_THAT(std::string(PagePool::Create(*backend_, layout, int64_t{1} << 50).status().message()),
              HasSubstr("overflow 64 bits"));
}

INSTANTIATE_TEST_SUITE_P(Streams, PagePoolTest,
                         testing::Values(CpuStreamMode::kImmediate, CpuStreamMode::kDeferred));

}  // namespace
}  // namespace heddle
