#include "runtime/checkpoint/gguf.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/runtime/checkpoint/files.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

absl::StatusOr<GgufFile> Parse(const std::string& contents) {
  return ParseGguf(contents, "m.gguf");
}

std::string Error(const std::string& contents) {
  // A copy of exactly the file's size, so that a read past its end is a read past an allocation.
  const std::vector<char> exact(contents.begin(), contents.end());
  const auto file = ParseGguf(absl::string_view(exact.data(), exact.size()), "m.gguf");
  EXPECT_FALSE(file.ok());
  if (file.ok()) return "";
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("m.gguf"));
  return std::string(file.status().message());
}

std::string Array(uint32_t type, uint64_t count, absl::string_view elements) {
  return absl::StrCat(Bytes(type), Bytes(count), elements);
}

GgufBuilder Small() {
  GgufBuilder builder;
  builder.String("general.architecture", "llama")
      .Uint32("a.number", 7)
      .Float32("a.float", 0.5f)
      .Bool("a.flag", true)
      .Strings("a.strings", {"x", "", "yz"})
      .Raw("a.int8", 1, Bytes<int8_t>(-3))
      .Raw("a.uint64", 10, Bytes(kMax))
      .Raw("a.ints", 9, Array(5, 2, Bytes<int32_t>(-1) + Bytes<int32_t>(4)))
      .Raw("a.floats", 9, Array(6, 2, Bytes(1.5f) + Bytes(-2.0f)))
      .Raw("a.none", 9, Array(8, 0, ""))
      .Tensor("f", {2, 3}, 0, std::string(24, 'x'))
      .Tensor("q", {2, 32}, 8, std::string(68, 'y'))
      .Tensor("k", {1, 256}, 14, std::string(210, 'z'));
  return builder;
}

TEST(Gguf, ReadsMetadataByType) {
  const std::string contents = Small().Build();
  const auto file = Parse(contents);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto value = [&](absl::string_view key) { return file->metadata.at(key); };
  EXPECT_EQ(value("general.architecture").String(), "llama");
  EXPECT_EQ(value("a.number").Integer(), 7);
  EXPECT_EQ(value("a.number").Number(), 7.0);
  EXPECT_EQ(value("a.float").Number(), 0.5);
  EXPECT_EQ(value("a.flag").Bool(), true);
  EXPECT_THAT(*value("a.strings").Strings(), ElementsAre("x", "", "yz"));
  EXPECT_EQ(value("a.int8").Integer(), -3);
  EXPECT_THAT(*value("a.ints").Integers(), ElementsAre(-1, 4));
  EXPECT_THAT(*value("a.floats").Floats(), ElementsAre(1.5f, -2.0f));
  EXPECT_THAT(*value("a.none").Strings(), ElementsAre());

  // Nothing is read as what it is not.
  EXPECT_FALSE(value("general.architecture").Integer());
  EXPECT_FALSE(value("general.architecture").Strings());
  EXPECT_FALSE(value("a.number").String());
  EXPECT_FALSE(value("a.number").Bool());
  EXPECT_FALSE(value("a.number").Integers());
  EXPECT_FALSE(value("a.float").Integer());
  EXPECT_FALSE(value("a.flag").Integer());
  EXPECT_FALSE(value("a.uint64").Integer());  // does not fit
  EXPECT_FALSE(value("a.strings").String());
  EXPECT_FALSE(value("a.strings").Integers());
  EXPECT_FALSE(value("a.strings").Floats());
  EXPECT_FALSE(value("a.ints").Floats());
  EXPECT_FALSE(value("a.ints").Strings());
  EXPECT_FALSE(value("a.floats").Integers());
  EXPECT_FALSE(value("a.none").Integers());
  EXPECT_EQ(value("a.strings").TypeName(), "array of string");
  EXPECT_EQ(value("a.uint64").TypeName(), "uint64");
}

TEST(Gguf, ReadsTensors) {
  for (const uint32_t version : {2u, 3u}) {
    const std::string contents = Small().Build(version);
    const auto file = Parse(contents);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->version, version);
    ASSERT_EQ(file->tensors.size(), 3u);
    EXPECT_EQ(file->tensors[0].name, "f");
    EXPECT_THAT(file->tensors[0].shape, ElementsAre(2, 3));
    EXPECT_EQ(file->tensors[0].dtype, DType::kFloat32);
    EXPECT_EQ(file->tensors[1].dtype, DType::kQ8_0);
    EXPECT_EQ(file->tensors[1].bytes, 68);
    EXPECT_EQ(contents.substr(file->tensors[1].offset, 68), std::string(68, 'y'));
    EXPECT_EQ(contents.substr(file->tensors[2].offset, 210), std::string(210, 'z'));
    EXPECT_EQ(file->tensors[2].offset % 32, 0);
  }
}

TEST(Gguf, EveryTensorTypeHasItsSize) {
  const std::vector<std::pair<uint32_t, DType>> types = {
      {0, DType::kFloat32}, {1, DType::kFloat16}, {2, DType::kQ4_0},     {3, DType::kQ4_1},
      {6, DType::kQ5_0},    {7, DType::kQ5_1},    {8, DType::kQ8_0},     {12, DType::kQ4_K},
      {13, DType::kQ5_K},   {14, DType::kQ6_K},   {30, DType::kBFloat16}};
  for (const auto& [id, dtype] : types) {
    const int64_t bytes = *RowBytes(dtype, 512) * 3;
    const std::string contents =
        GgufBuilder().Tensor("w", {3, 512}, id, std::string(bytes, 'x')).Build();
    const auto file = Parse(contents);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->tensors[0].dtype, dtype);
    EXPECT_EQ(file->tensors[0].bytes, bytes);
    EXPECT_THAT(Error(contents.substr(0, contents.size() - 1)), HasSubstr("cut off"));
  }
}

TEST(Gguf, SaysWhatAFileIsInstead) {
  EXPECT_THAT(Error(""), AllOf(HasSubstr("0 bytes"), HasSubstr("file is empty")));
  EXPECT_THAT(Error("GGU"), HasSubstr("not a GGUF file"));
  EXPECT_THAT(Error("version https://git-lfs.github.com/spec/v1\n"), HasSubstr("Git LFS pointer"));
  EXPECT_THAT(Error("GGUF123"), HasSubstr("interrupted"));
  EXPECT_THAT(Error(Small().Build(1)), HasSubstr("version 1 is not supported; 2 and 3 are"));
  EXPECT_THAT(Error(Small().Build(4)), HasSubstr("version 4"));
  EXPECT_THAT(Error(Small().Build(0x03000000)), HasSubstr("big-endian"));
}

TEST(Gguf, EveryPrefixIsRefused) {
  const std::string contents = Small().Build();
  for (size_t size = 0; size < contents.size(); ++size) {
    const auto file = Parse(contents.substr(0, size));
    EXPECT_FALSE(file.ok()) << size;
  }
}

TEST(Gguf, CountsThatTheFileCannotHold) {
  for (const uint64_t count : {uint64_t{100}, uint64_t{1} << 32, uint64_t{1} << 60, kMax}) {
    EXPECT_THAT(Error(GgufBuilder().BuildHeader(3, count, 0)),
                HasSubstr(absl::StrCat(count, " tensors do not fit")));
    EXPECT_THAT(Error(GgufBuilder().BuildHeader(3, 0, count)),
                HasSubstr(absl::StrCat(count, " metadata keys do not fit")));
    for (const uint32_t type : {0u, 4u, 8u, 12u}) {
      EXPECT_THAT(Error(GgufBuilder().Raw("a", 9, Array(type, count, "")).Build()),
                  HasSubstr(absl::StrCat(count, " array elements do not fit")));
    }
    // A string's length; a key's length.
    EXPECT_THAT(Error(GgufBuilder().Raw("a", 8, Bytes(count)).Build()),
                HasSubstr(absl::StrCat("expected ", count, " more bytes")));
    EXPECT_THAT(
        Error(absl::StrCat(GgufBuilder().BuildHeader(3, 0, 1), Bytes(count), std::string(16, 'x'))),
        HasSubstr(absl::StrCat("expected ", count, " more bytes")));
  }
  // More elements than strings: the last length lies past the end.
  EXPECT_THAT(Error(GgufBuilder()
                        .Raw("a", 9, Array(8, 2, Bytes<uint64_t>(8) + "12345678"))
                        .BuildHeader(3, 0, 1)),
              HasSubstr("metadata key a: expected"));
}

TEST(Gguf, MetadataTypes) {
  EXPECT_THAT(Error(GgufBuilder().Raw("a", 13, "xxxxxxxx").Build()),
              HasSubstr("metadata key a: unknown metadata type 13"));
  EXPECT_THAT(Error(GgufBuilder().Raw("a", 0xffffffff, "xxxxxxxx").Build()),
              HasSubstr("unknown metadata type 4294967295"));
  EXPECT_THAT(Error(GgufBuilder().Raw("a", 9, Array(13, 1, "xxxxxxxx")).Build()),
              HasSubstr("unknown metadata type 13"));
  std::string nested;
  for (int depth = 0; depth < 10000; ++depth) nested += Array(9, 1, "");
  EXPECT_THAT(Error(GgufBuilder().Raw("a", 9, nested).Build()), HasSubstr("an array of arrays"));
  EXPECT_THAT(Error(GgufBuilder().Uint32("a", 1).Uint32("a", 1).Build()),
              HasSubstr("metadata key a is given twice"));
}

TEST(Gguf, Alignment) {
  for (const uint32_t alignment : {0u, 3u, 48u, 1u << 21, 0xffffffffu}) {
    EXPECT_THAT(Error(GgufBuilder().Uint32("general.alignment", alignment).Build()),
                HasSubstr("power of two"));
  }
  EXPECT_THAT(Error(GgufBuilder().String("general.alignment", "32").Build()),
              HasSubstr("general.alignment"));
  const auto builder = [](uint64_t offset) {
    return GgufBuilder().Uint32("general.alignment", 64).RawTensor("w", {1}, 0, offset).Build() +
           std::string(200, 'x');
  };
  EXPECT_THAT(Error(builder(32)), HasSubstr("32 is not a multiple of the alignment 64"));
}

TEST(Gguf, TensorShapes) {
  const auto error = [](const std::vector<uint64_t>& dimensions, uint32_t type) {
    return Error(GgufBuilder().RawTensor("w", dimensions, type, 0).Build() + std::string(64, 'x'));
  };
  EXPECT_THAT(error({}, 0), HasSubstr("tensor w: 0 dimensions"));
  EXPECT_THAT(error({1, 1, 1, 1, 1}, 0), HasSubstr("5 dimensions"));
  EXPECT_THAT(error(std::vector<uint64_t>(65, 1), 0), HasSubstr("65 dimensions"));
  EXPECT_THAT(error({uint64_t{1} << 63}, 0), HasSubstr("dimension above 2^63"));
  EXPECT_THAT(error({kMax, 8}, 0), HasSubstr("dimension above 2^63"));
  for (const std::vector<uint64_t>& dimensions : std::vector<std::vector<uint64_t>>{
           {uint64_t{1} << 62, 4},
           {(uint64_t{1} << 62) + 1, 4},
           {(uint64_t{1} << 42) + 1, uint64_t{1} << 42},
           {kMax >> 1, 2},
           {uint64_t{1} << 61},
           {uint64_t{1} << 32, uint64_t{1} << 32, uint64_t{1} << 32, uint64_t{1} << 32}}) {
    EXPECT_THAT(error(dimensions, 0), HasSubstr("overflows"));
  }
  EXPECT_THAT(error({33}, 8), HasSubstr("not a whole number of Q8_0 blocks of 32"));
  EXPECT_THAT(error({128}, 12), HasSubstr("not a whole number of Q4_K blocks of 256"));
  // Fewer bytes than the shape says.
  EXPECT_THAT(error({1024}, 0), AllOf(HasSubstr("cut off"), HasSubstr("Incomplete: w")));
}

TEST(Gguf, TensorTypes) {
  const auto error = [](uint32_t type) {
    return Error(GgufBuilder().RawTensor("w", {256}, type, 0).Build() + std::string(64, 'x'));
  };
  EXPECT_THAT(error(10), AllOf(HasSubstr("stored as Q2_K"), HasSubstr("supported are F32")));
  EXPECT_THAT(error(23), HasSubstr("IQ4_XS"));
  for (const uint32_t type : {4u, 5u, 99u, 0xffffffffu}) {
    EXPECT_THAT(error(type), HasSubstr(absl::StrCat("stored as type ", type)));
  }
}

TEST(Gguf, TensorSpans) {
  const std::string data(64, 'x');
  EXPECT_THAT(
      Error(GgufBuilder().RawTensor("a", {8}, 0, 0).RawTensor("b", {8}, 0, 0).Build() + data),
      HasSubstr("overlaps"));
  EXPECT_THAT(
      Error(GgufBuilder().RawTensor("a", {9}, 0, 0).RawTensor("b", {8}, 0, 32).Build() + data),
      HasSubstr("tensor b at byte"));
  EXPECT_THAT(
      Error(GgufBuilder().RawTensor("w", {8}, 0, 0).RawTensor("w", {8}, 0, 32).Build() + data),
      HasSubstr("tensor w is given twice"));
  EXPECT_THAT(Error(GgufBuilder().RawTensor("w", {8}, 0, 64).Build() + data),
              HasSubstr("Incomplete: w"));
  for (const uint64_t offset :
       {uint64_t{1} << 40, (uint64_t{1} << 63) - 32, uint64_t{1} << 63, kMax - 31}) {
    Error(GgufBuilder().RawTensor("w", {8}, 0, offset).Build() + data);
  }
  EXPECT_THAT(Error(GgufBuilder().Tensor("w", {8}, 0, std::string(32, 'x')).Build() + data),
              HasSubstr("64 trailing bytes"));
  // What pads the last tensor is no fault.
  EXPECT_TRUE(
      Parse(GgufBuilder().Tensor("w", {7}, 0, std::string(28, 'x')).Build() + "\0\0\0\0").ok());
}

TEST(Gguf, EmptyTensorsAndFiles) {
  EXPECT_TRUE(Parse(GgufBuilder().Build()).ok());
  EXPECT_TRUE(Parse(GgufBuilder().String("a", "b").BuildHeader(3, 0, 1)).ok());
  const auto file = Parse(GgufBuilder().RawTensor("e", {0, 4}, 0, 0).Build());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors[0].bytes, 0);
}

}  // namespace
}  // namespace heddle
