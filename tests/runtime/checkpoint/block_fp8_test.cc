// Block-fp8 checkpoints: which element meets which scale, and what is refused.
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gemm/dequantise.h"
#include "nlohmann/json.hpp"
#include "runtime/checkpoint/safetensors.h"
#include "tests/runtime/checkpoint/files.h"
#include "tests/runtime/checkpoint/open.h"

namespace heddle {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kDown[] = "model.layers.0.mlp.down_proj.weight";  // [40, 48] in blocks of 16
constexpr char kDownScales[] = "model.layers.0.mlp.down_proj.weight_scale_inv";

// A safetensors file taken apart, to be changed and put together again.
struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;

Tensors Parse(const std::string& file) {
  Tensors tensors;
  const auto stored = ParseSafetensors(file, "model.safetensors");
  EXPECT_TRUE(stored.ok()) << stored.status();
  for (const StoredTensor& tensor : *stored) {
    tensors[tensor.name] = {tensor.type_name, tensor.shape,
                            file.substr(tensor.offset, tensor.bytes)};
  }
  return tensors;
}

std::string Serialise(const Tensors& tensors, size_t padding = 0) {
  json header = json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    data += tensor.bytes;
    header[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return SafetensorsFile(header.dump() + std::string(padding, ' '), data);
}

// A copy of a golden model to spoil.
class SpoiltModel {
 public:
  explicit SpoiltModel(const char* name = "mla-v3-fp8") {
    CopyDirectory(GoldenPath(name), directory_);
    tensors = Parse(ReadFile(directory_.path() + "/model.safetensors"));
  }

  absl::StatusOr<Checkpoint> Open(size_t padding = 0) {
    directory_.Write("model.safetensors", Serialise(tensors, padding));
    return OpenCheckpoint(directory_.path(), LoadFormat::kAuto, 0);
  }
  // Why it does not open.
  std::string Refusal() { return std::string(Open().status().message()); }
  // Why a matrix that opened cannot be read.
  std::string ReadError(Range rows, Range cols) {
    const absl::StatusOr<Checkpoint> checkpoint = Open();
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return std::string(checkpoint->weights->Read(kDown, rows, cols).status().message());
  }
  void SetScale(int64_t row, int64_t col, float value) {
    Tensor& scales = tensors.at(kDownScales);
    std::memcpy(scales.bytes.data() + (row * scales.shape[1] + col) * 4, &value, 4);
  }
  void SetCode(int64_t row, int64_t col, int code) {
    Tensor& matrix = tensors.at(kDown);
    matrix.bytes[row * matrix.shape[1] + col] = static_cast<char>(code);
  }
  const TemporaryDirectory& directory() const { return directory_; }

  Tensors tensors;

 private:
  TemporaryDirectory directory_;
};

// Element (row, col) by the definition of ModelSpec's BlockFp8Spec.
float ElementOf(const Tensors& tensors, const std::string& name, const BlockFp8Spec& blocks,
                int64_t row, int64_t col) {
  const Tensor& matrix = tensors.at(name);
  const Tensor& scales = tensors.at(name + "_scale_inv");
  const int64_t block = row / blocks.block_rows * scales.shape[1] + col / blocks.block_columns;
  float scale;
  std::memcpy(&scale, scales.bytes.data() + block * 4, 4);
  return Float8E4M3ToFloat(static_cast<uint8_t>(matrix.bytes[row * matrix.shape[1] + col])) * scale;
}

void ExpectElements(const TensorSlice& slice, const Tensors& tensors, const std::string& name,
                    const BlockFp8Spec& blocks, Range rows, Range cols) {
  ASSERT_EQ(slice.rows.dtype, DType::kFloat8E4M3);
  ASSERT_EQ(slice.rows.n, rows.size());
  ASSERT_EQ(slice.rows.k, cols.size());
  std::vector<float> values(cols.size());
  for (int64_t row = 0; row < rows.size(); ++row) {
    ASSERT_TRUE(DequantiseRow(slice.rows, row, values.data()).ok());
    for (int64_t col = 0; col < cols.size(); ++col) {
      ASSERT_EQ(values[col], ElementOf(tensors, name, blocks, rows.begin + row, cols.begin + col))
          << name << "[" << rows.begin + row << ", " << cols.begin + col << "]";
    }
  }
}

TEST(BlockFp8, EverySliceHasItsOwnScales) {
  for (const char* model : {"mla-v3-fp8", "mla-v3-fp8-oblong"}) {
    SCOPED_TRACE(model);
    const Tensors tensors = Parse(ReadFile(GoldenPath(model) + "/model.safetensors"));
    const Checkpoint checkpoint = MustOpen(GoldenPath(model));
    const BlockFp8Spec blocks = *checkpoint.spec.block_fp8;
    int num_float8 = 0;
    for (const TensorInfo& info : checkpoint.weights->tensors()) {
      ASSERT_EQ(info.dtype == DType::kFloat8E4M3, tensors.at(info.name).dtype == "F8_E4M3");
      if (info.dtype != DType::kFloat8E4M3) continue;
      ++num_float8;
      const int64_t rows = info.shape[0], cols = info.shape[1];
      // Whole; a head's rows and a rank's columns that cut blocks; one and a half blocks; a corner.
      for (const Range row_range :
           {Range{0, rows}, Range{rows / 3, rows - 1}, Range{rows - 1, rows}}) {
        for (const Range col_range :
             {Range{0, cols}, Range{cols / 2, cols}, Range{5, cols - 2}, Range{cols - 1, cols}}) {
          ExpectElements(MustRead(*checkpoint.weights, info.name, row_range, col_range), tensors,
                         info.name, blocks, row_range, col_range);
        }
      }
    }
    EXPECT_EQ(num_float8, 3 * 5 + 3 + 2 * 9 * 3);
    EXPECT_EQ(checkpoint.weights->Find("lm_head.weight")->dtype, DType::kBFloat16);
    EXPECT_EQ(checkpoint.weights->Find("model.layers.1.mlp.gate.weight")->dtype, DType::kBFloat16);
    EXPECT_FALSE(checkpoint.weights->Has(kDownScales));
  }
}

TEST(BlockFp8, EmptySlicesKnowTheirBlocks) {
  const Checkpoint checkpoint = MustOpen(GoldenPath("mla-v3-fp8-oblong"));
  for (const auto& [rows, cols] :
       {std::pair(Range{3, 3}, Range{0, 48}), {Range{0, 4}, Range{48, 48}}}) {
    const TensorSlice slice = MustRead(*checkpoint.weights, kDown, rows, cols);
    EXPECT_EQ(slice.rows.scales.block_rows, 128);
    EXPECT_EQ(slice.rows.scales.block_columns, 24);
  }
}

TEST(BlockFp8, NeitherAlignmentNorTheScalesTypeMatters) {
  SpoiltModel model;
  const Range rows = {7, 40}, cols = {3, 48};
  const BlockFp8Spec blocks = {16, 16};
  for (const size_t padding : {1, 2, 3}) {
    const absl::StatusOr<Checkpoint> shifted = model.Open(padding);
    ASSERT_TRUE(shifted.ok()) << shifted.status();
    ExpectElements(MustRead(*shifted->weights, kDown, rows, cols), model.tensors, kDown, blocks,
                   rows, cols);
    shifted->weights->Release(kDown);
  }
  // As bfloat16, to which they are rounded first.
  Tensor& scales = model.tensors.at(kDownScales);
  std::string narrow;
  for (size_t i = 0; i < scales.bytes.size(); i += 4) {
    float scale;
    std::memcpy(&scale, &scales.bytes[i], 4);
    const uint16_t bits = FloatToBFloat16(scale);
    narrow += Bytes(bits);
    const float rounded = BFloat16ToFloat(bits);
    std::memcpy(&scales.bytes[i], &rounded, 4);
  }
  const Tensors expected = model.tensors;
  scales = {"BF16", scales.shape, narrow};
  const absl::StatusOr<Checkpoint> checkpoint = model.Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectElements(MustRead(*checkpoint->weights, kDown, rows, cols), expected, kDown, blocks, rows,
                 cols);
}

TEST(BlockFp8, AMissingScaleIsNeverOne) {
  SpoiltModel model;
  model.tensors.erase(kDownScales);
  EXPECT_THAT(model.Refusal(),
              HasSubstr("missing tensor model.layers.0.mlp.down_proj.weight_scale_inv: "
                        "model.layers.0.mlp.down_proj.weight is stored as F8_E4M3 and means "
                        "nothing without its scales"));
}

TEST(BlockFp8, ScalesOfAnotherShapeOrTypeAreRefused) {
  SpoiltModel model;
  model.tensors.at(kDownScales).shape = {9, 1};
  EXPECT_THAT(model.Refusal(),
              HasSubstr("weight_scale_inv is [9, 1], expected [3, 3]: "
                        "model.layers.0.mlp.down_proj.weight [40, 48] is in blocks of [16, 16]"));
  model.tensors.at(kDownScales).shape = {9};
  EXPECT_THAT(model.Refusal(), HasSubstr("weight_scale_inv is [9], expected [3, 3]"));
  model.tensors.at(kDownScales).shape = {3, 3};
  model.tensors.at(kDownScales).dtype = "I32";
  EXPECT_THAT(model.Refusal(),
              HasSubstr("weight_scale_inv is stored as I32, which is not supported for scales"));
}

TEST(BlockFp8, ScalesThatScaleNothingAreUnknown) {
  SpoiltModel model;
  model.tensors["lm_head.weight_scale_inv"] = {"F32", {1}, Bytes(1.0f)};
  EXPECT_THAT(model.Refusal(), HasSubstr("unknown tensor lm_head.weight_scale_inv"));
  SpoiltModel plain("mla-v3");
  plain.tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"] = {"F32", {1}, Bytes(1.0f)};
  EXPECT_THAT(plain.Refusal(),
              HasSubstr("unknown tensor model.layers.0.self_attn.o_proj.weight_scale_inv"));
}

TEST(BlockFp8, NeedsAConfigThatSaysSo) {
  SpoiltModel model;
  json config = json::parse(ReadFile(model.directory().path() + "/config.json"));
  config.erase("quantization_config");
  model.directory().Write("config.json", config.dump());
  EXPECT_THAT(model.Refusal(),
              AllOf(HasSubstr("down_proj.weight is stored as F8_E4M3, but no quantization_config "
                              "tells its weight_block_size"),
                    HasSubstr("unknown tensor"), Not(HasSubstr("missing"))));
}

TEST(BlockFp8, AVectorCannotBeFloat8) {
  SpoiltModel model;
  Tensor& norm = model.tensors.at("model.norm.weight");
  norm = {"F8_E4M3", norm.shape, std::string(norm.shape[0], '\x38')};
  EXPECT_THAT(model.Refusal(), HasSubstr("tensor model.norm.weight is stored as F8_E4M3, which is "
                                         "not supported for a vector"));
}

TEST(BlockFp8, CodesThatAreNanAreRefusedByPlace) {
  SpoiltModel model;
  model.SetCode(21, 30, 0xff);
  model.SetCode(21, 40, 0x7f);
  const std::string expected = "model.layers.0.mlp.down_proj.weight[21, ";
  EXPECT_EQ(model.ReadError({0, 40}, {0, 48}), expected + "30] is NaN");
  EXPECT_EQ(model.ReadError({20, 22}, {31, 48}), expected + "40] is NaN");
  // Other ranks' slices are sound.
  EXPECT_EQ(model.ReadError({0, 21}, {0, 48}), "");
  EXPECT_EQ(model.ReadError({0, 40}, {0, 30}), "");
}

TEST(BlockFp8, ScalesMustBeFiniteAndNotNegative) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (const float bad :
       {std::nanf(""), std::numeric_limits<float>::infinity(), -1.0f, kLargest, kLargest / 440}) {
    SpoiltModel model;
    model.SetScale(1, 2, bad);
    EXPECT_THAT(model.ReadError({0, 40}, {0, 48}),
                AllOf(HasSubstr("model.layers.0.mlp.down_proj.weight_scale_inv[1, 2] is "),
                      HasSubstr(", which is no scale of float8 weights")));
    EXPECT_EQ(model.ReadError({0, 16}, {0, 48}), "");
    EXPECT_EQ(model.ReadError({0, 40}, {0, 32}), "");
  }
  for (const float good : {0.0f, 1e-40f, kLargest / 450}) {
    SpoiltModel model;
    model.SetScale(1, 2, good);
    EXPECT_EQ(model.ReadError({0, 40}, {0, 48}), "");
  }
}

}  // namespace
}  // namespace heddle
