#include "tests/runtime/checkpoint/open.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace heddle {

std::string GoldenPath(absl::string_view name) {
  return absl::StrCat(HEDDLE_TESTS_DIR, "/golden/models/", name);
}

Checkpoint MustOpen(const std::string& path, LoadFormat format, uint64_t seed) {
  auto checkpoint = OpenCheckpoint(path, format, seed);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return checkpoint.ok() ? *std::move(checkpoint) : Checkpoint();
}

TensorSlice MustRead(WeightSource& weights, absl::string_view name, Range rows, Range cols) {
  auto slice = weights.Read(name, rows, cols);
  EXPECT_TRUE(slice.ok()) << slice.status();
  return slice.ok() ? *std::move(slice) : TensorSlice();
}

std::vector<float> MustReadVector(WeightSource& weights, absl::string_view name, Range range) {
  auto values = weights.ReadVector(name, range);
  EXPECT_TRUE(values.ok()) << values.status();
  return values.ok() ? *std::move(values) : std::vector<float>();
}

std::string SliceBytes(const TensorSlice& slice) {
  const WeightRows& rows = slice.rows;
  const int64_t block = BlockElements(rows.dtype);
  const int64_t blocks = (rows.k_offset + rows.k + block - 1) / block;
  std::string bytes;
  for (int64_t row = 0; row < rows.n; ++row) {
    bytes.append(reinterpret_cast<const char*>(rows.data) + row * rows.row_stride_bytes,
                 blocks * BlockBytes(rows.dtype));
  }
  return bytes;
}

}  // namespace heddle
