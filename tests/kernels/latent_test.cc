// latent_append and latent_gather: latents into their pages and out of them.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kv_append/latent_append.h"
#include "kernels/kv_append/latent_gather.h"
#include "tests/kernels/cpu_device.h"
#include "tests/kernels/stored_type.h"

namespace heddle {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// A plane of pages full of NaN, with odd strides, and its shadow of what it should hold.
class LatentPlane {
 public:
  LatentPlane(CpuDevice& device, DType dtype, int64_t num_slots, int64_t page_size, int64_t width)
      : width_(width),
        stride_(page_size * width + 3),
        shadow_(num_slots * stride_, kNan),
        view_{device.Upload(Encode(dtype, shadow_)), dtype, stride_, page_size * width} {}

  const KvPlane& view() const { return view_; }
  void Expect(int64_t slot, int64_t offset, const float* values) {
    std::copy_n(values, width_, &shadow_[slot * stride_ + offset * width_]);
  }
  void ExpectMatch() const {
    const std::vector<std::byte> expected = Encode(view_.dtype, shadow_);
    EXPECT_EQ(std::memcmp(view_.data, expected.data(), expected.size()), 0);
  }

 private:
  int64_t width_, stride_;
  std::vector<float> shadow_;
  KvPlane view_;
};

// Rows of a latent, and of a rotated key behind it, as kv_a leaves them.
struct Rows {
  Rows(CpuDevice& device, int64_t tokens, int64_t rank, int64_t rope, std::mt19937& random)
      : values(RandomFloats(tokens * (rank + rope), random)), stride(rank + rope) {
    const float* data = device.Upload(values);
    latent = {data, DType::kFloat32, tokens, rank, stride};
    rotated = {data + rank, DType::kFloat32, tokens, rope, stride};
  }
  std::vector<float> values;
  int64_t stride;
  ConstMatrixView latent, rotated;
};

struct Widths {
  int64_t rank, rope;
};

TEST(LatentAppend, WritesItsTokensAndNothingElse) {
  std::mt19937 random(1);
  for (const DType dtype : kTypes) {
    for (const int64_t page_size : {1, 3, 16, 64, 128}) {
      for (const auto& [rank, rope] : {Widths{16, 4}, {20, 6}, {512, 64}, {1, 1}}) {
        SCOPED_TRACE(
            absl::StrCat(std::string(DTypeName(dtype)), " page ", page_size, " ", rank, "+", rope));
        CpuDevice device(2, CpuStreamMode::kDeferred);
        constexpr int64_t kTokens = 150;
        LatentPlane latents(device, dtype, 160, page_size, rank);
        LatentPlane ropes(device, DType::kFloat32, 160, page_size, rope);
        const Rows rows(device, kTokens, rank, rope, random);
        std::vector<int32_t> slots, offsets;
        for (int64_t token = 0; token < kTokens; ++token) {
          // Every ninth belongs to another rank, whose offset may be anything.
          const bool ours = token % 9 != 8;
          slots.push_back(ours ? static_cast<int32_t>(token / page_size + 7) : -1);
          offsets.push_back(ours ? static_cast<int32_t>(token % page_size) : -5);
          if (!ours) continue;
          latents.Expect(slots.back(), offsets.back(), &rows.values[token * rows.stride]);
          ropes.Expect(slots.back(), offsets.back(), &rows.values[token * rows.stride + rank]);
        }
        const LatentAppendArgs args = {.latent = rows.latent,
                                       .rope = rows.rotated,
                                       .latent_plane = latents.view(),
                                       .rope_plane = ropes.view(),
                                       .page_size = page_size,
                                       .slots = device.Upload(slots),
                                       .page_offsets = device.Upload(offsets)};
        ASSERT_TRUE(device.kernels().latent_append(args, device.stream()).ok());
        device.Synchronize();
        latents.ExpectMatch();
        ropes.ExpectMatch();
      }
    }
  }
}

// Whether a token comes from its page or from the step that is about to store it, it reads the
// same; what another rank holds is left to it.
TEST(LatentGather, PagesAndLocalRowsGiveTheSameBits) {
  std::mt19937 random(2);
  for (const DType dtype : kTypes) {
    for (const int64_t page_size : {1, 3, 16, 64}) {
      SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " page ", page_size));
      constexpr int64_t kTokens = 70, kRank = 20, kRope = 6;
      constexpr int64_t kFirst = 5, kEnd = 68;  // positions of the segment
      CpuDevice device(2, CpuStreamMode::kDeferred);
      LatentPlane latents(device, dtype, 80, page_size, kRank);
      LatentPlane ropes(device, dtype, 80, page_size, kRope);
      const Rows rows(device, kTokens, kRank, kRope, random);
      std::vector<int32_t> slots, offsets, positions;
      std::vector<PageSpan> pages;  // every third is another rank's
      for (int32_t token = 0; token < kTokens; ++token) {
        const auto size = static_cast<int32_t>(page_size);
        slots.push_back(token / size + 3);
        offsets.push_back(token % size);
        positions.push_back(token);
        if (token % size == 0 && token / size % 3 != 2) {
          pages.push_back({slots.back(), std::min<int32_t>(size, kTokens - token), token});
        }
      }
      ASSERT_TRUE(device.kernels()
                      .latent_append({.latent = rows.latent,
                                      .rope = rows.rotated,
                                      .latent_plane = latents.view(),
                                      .rope_plane = ropes.view(),
                                      .page_size = page_size,
                                      .slots = device.Upload(slots),
                                      .page_offsets = device.Upload(offsets)},
                                     device.stream())
                      .ok());
      // The step's own tokens of two sequences: none of the first, positions [num_stored, ...) of
      // the second.
      for (const int32_t num_stored : {0, 3, 40, 70}) {
        const std::vector<int32_t> query_starts = {num_stored, num_stored, kTokens};
        const std::vector<int32_t> segment_starts = {0, 0, kEnd - kFirst};
        const std::vector<int32_t> page_starts = {0, 0, static_cast<int32_t>(pages.size())};
        float* out = device.Upload(std::vector<float>((kEnd - kFirst) * (kRank + kRope), kNan));
        const LatentGatherArgs args = {
            .pages = {.latent = latents.view(),
                      .rope = ropes.view(),
                      .kv_lora_rank = kRank,
                      .rope_dim = kRope,
                      .page_size = page_size,
                      .page_starts = device.Upload(page_starts),
                      .pages = device.Upload(pages)},
            .local_latent = rows.latent,
            .local_rope = rows.rotated,
            .num_sequences = 2,
            .query_starts = device.Upload(query_starts),
            .positions = device.Upload(positions),
            .segment_starts = device.Upload(segment_starts),
            .segment_positions = device.Upload(std::vector<int32_t>{0, kFirst}),
            .latent = {out, DType::kFloat32, kEnd - kFirst, kRank, kRank + kRope},
            .rope = {out + kRank, DType::kFloat32, kEnd - kFirst, kRope, kRank + kRope}};
        ASSERT_TRUE(device.kernels().latent_gather(args, device.stream()).ok());
        device.Synchronize();
        for (int64_t position = kFirst; position < kEnd; ++position) {
          const bool known = position >= num_stored || position / page_size % 3 != 2;
          for (int64_t i = 0; i < kRank + kRope; ++i) {
            const float value = rows.values[position * (kRank + kRope) + i];
            ASSERT_EQ(out[(position - kFirst) * (kRank + kRope) + i],
                      known ? Stored(dtype, value) : 0.0f)
                << num_stored << " stored, position " << position << " element " << i;
          }
        }
      }
    }
  }
}

// Without a cache nothing is rounded.
TEST(LatentGather, ReadsTheStepAloneWithoutACache) {
  std::mt19937 random(3);
  CpuDevice device;
  const Rows rows(device, 5, 4, 2, random);
  std::vector<float> out(3 * 6, kNan);
  const std::vector<int32_t> query_starts = {1, 5}, positions = {9, 0, 1, 2, 3};
  const std::vector<int32_t> segment_starts = {0, 3};
  const int32_t first_position = 1;
  ASSERT_TRUE(device.kernels()
                  .latent_gather({.pages = {},
                                  .local_latent = rows.latent,
                                  .local_rope = rows.rotated,
                                  .num_sequences = 1,
                                  .query_starts = query_starts.data(),
                                  .positions = positions.data(),
                                  .segment_starts = segment_starts.data(),
                                  .segment_positions = &first_position,
                                  .latent = {out.data(), DType::kFloat32, 3, 4, 6},
                                  .rope = {out.data() + 4, DType::kFloat32, 3, 2, 6}},
                                 device.stream())
                  .ok());
  device.Synchronize();
  EXPECT_EQ(out, std::vector<float>(rows.values.begin() + 2 * 6, rows.values.begin() + 5 * 6));
}

TEST(LatentAppend, RefusesArgumentsByName) {
  CpuDevice device;
  float memory[64] = {};
  const int32_t zero = 0;
  const LatentAppendArgs good = {.latent = FloatMatrix(static_cast<const float*>(memory), 1, 4),
                                 .rope = FloatMatrix(static_cast<const float*>(memory), 1, 2),
                                 .latent_plane = {memory, DType::kFloat32, 16, 16},
                                 .rope_plane = {memory, DType::kFloat32, 8, 8},
                                 .page_size = 4,
                                 .slots = &zero,
                                 .page_offsets = &zero};
  const auto error = [&](auto spoil) {
    LatentAppendArgs args = good;
    spoil(args);
    absl::Status status = device.kernels().latent_append(args, device.stream());
    if (status.ok()) status = device.stream().Synchronize();
    return std::string(status.message());
  };
  EXPECT_EQ(error([](LatentAppendArgs&) {}), "");
  EXPECT_THAT(error([](LatentAppendArgs& a) { a.rope.rows = 2; }),
              HasSubstr("latent_append: rope is [2, 2], not [1, 2]"));
  EXPECT_THAT(error([](LatentAppendArgs& a) { a.latent_plane.dtype = DType::kInt8; }),
              HasSubstr("latent_plane is int8"));
  EXPECT_THAT(error([](LatentAppendArgs& a) { a.rope_plane.slot_stride = 7; }),
              HasSubstr("rope_plane has head stride 8 and slot stride 7"));
  EXPECT_THAT(error([](LatentAppendArgs& a) { a.slots = nullptr; }), HasSubstr("slots is null"));
  const int32_t four = 4;
  EXPECT_THAT(error([&](LatentAppendArgs& a) { a.page_offsets = &four; }),
              HasSubstr("latent_append: token 0 has offset 4 in a page of 4"));
}

TEST(LatentGather, RefusesArgumentsByName) {
  CpuDevice device;
  float memory[64] = {};
  const int32_t zero = 0;
  const std::vector<int32_t> one_row = {0, 1};
  PageSpan page = {.slot = 0, .num_valid = 1, .first_position = 0};
  const LatentGatherArgs good = {
      .pages = {.latent = {memory, DType::kFloat32, 16, 16},
                .rope = {memory, DType::kFloat32, 8, 8},
                .kv_lora_rank = 4,
                .rope_dim = 2,
                .page_size = 4,
                .page_starts = one_row.data(),
                .pages = &page},
      .local_latent = FloatMatrix(static_cast<const float*>(memory), 1, 4),
      .local_rope = FloatMatrix(static_cast<const float*>(memory), 1, 2),
      .num_sequences = 1,
      .query_starts = one_row.data(),
      .positions = &zero,
      .segment_starts = one_row.data(),
      .segment_positions = &zero,
      .latent = FloatMatrix(memory + 32, 1, 4),
      .rope = FloatMatrix(memory + 40, 1, 2)};
  const auto error = [&](auto spoil) {
    LatentGatherArgs args = good;
    spoil(args);
    absl::Status status = device.kernels().latent_gather(args, device.stream());
    if (status.ok()) status = device.stream().Synchronize();
    return std::string(status.message());
  };
  EXPECT_EQ(error([](LatentGatherArgs&) {}), "");
  EXPECT_THAT(error([](LatentGatherArgs& a) { a.local_latent.cols = 3; }),
              HasSubstr("latent_gather: local_latent is [1, 3], not [1, 4]"));
  EXPECT_THAT(error([](LatentGatherArgs& a) { a.local_rope.rows = 2; }),
              HasSubstr("local_rope is [2, 2], not [1, 2]"));
  EXPECT_THAT(error([](LatentGatherArgs& a) { a.segment_positions = nullptr; }),
              HasSubstr("segment_positions is null"));
  EXPECT_THAT(error([](LatentGatherArgs& a) { a.pages.rope.slot_stride = 7; }),
              HasSubstr("pages.rope has head stride 8 and slot stride 7"));
  const std::vector<int32_t> two_rows = {0, 2};
  EXPECT_THAT(error([&](LatentGatherArgs& a) { a.segment_starts = two_rows.data(); }),
              HasSubstr("latent_gather: sequence 0: rows 0 to 2 of 1"));
  EXPECT_THAT(error([&](LatentGatherArgs& a) { a.query_starts = two_rows.data(); }),
              HasSubstr("sequence 0: tokens 0 to 2 of 1"));
  page.num_valid = 5;
  EXPECT_THAT(error([](LatentGatherArgs&) {}), HasSubstr("page in slot 0 holds 5 of 4 tokens"));
}

}  // namespace
}  // namespace heddle
