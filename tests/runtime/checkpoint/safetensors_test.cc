#include "runtime/checkpoint/safetensors.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/runtime/checkpoint/files.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Entry(absl::string_view name, absl::string_view dtype, absl::string_view shape,
                  absl::string_view offsets) {
  return absl::StrFormat(R"("%s":{"dtype":"%s","shape":%s,"data_offsets":%s})", name, dtype, shape,
                         offsets);
}

std::string Error(const std::string& contents) {
  // A copy of exactly the file's size, so that a read past its end is a read past an allocation.
  const std::vector<char> exact(contents.begin(), contents.end());
  const auto tensors =
      ParseSafetensors(absl::string_view(exact.data(), exact.size()), "m.safetensors");
  EXPECT_FALSE(tensors.ok());
  if (tensors.ok()) return "";
  EXPECT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(tensors.status().message()), HasSubstr("m.safetensors"));
  return std::string(tensors.status().message());
}

std::string HeaderError(absl::string_view header, size_t data_bytes = 0) {
  return Error(SafetensorsFile(header, std::string(data_bytes, 'x')));
}

// One tensor that differs from a good one ("F32", [2,2], [0,16] of 16 bytes) in one part.
std::string ShapeError(absl::string_view shape) {
  return HeaderError(absl::StrCat("{", Entry("w", "F32", shape, "[0,16]"), "}"), 16);
}
std::string OffsetsError(absl::string_view offsets) {
  return HeaderError(absl::StrCat("{", Entry("w", "F32", "[2,2]", offsets), "}"), 16);
}

TEST(Safetensors, ReadsTensorsInAnyOrder) {
  const std::string header = absl::StrCat(
      R"({"__metadata__":{"format":"pt"},)", Entry("b", "BF16", "[3]", "[24,30]"), ",",
      Entry("a", "F32", "[3,2]", "[0,24]"), ",", Entry("c", "F64", "[]", "[30,38]"), "}   ");
  const auto tensors = ParseSafetensors(SafetensorsFile(header, std::string(38, 'x')), "f");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 3u);
  const int64_t data = 8 + static_cast<int64_t>(header.size());
  EXPECT_EQ((*tensors)[0].name, "b");
  EXPECT_EQ((*tensors)[0].dtype, DType::kBFloat16);
  EXPECT_EQ((*tensors)[0].offset, data + 24);
  EXPECT_EQ((*tensors)[0].bytes, 6);
  EXPECT_EQ((*tensors)[1].name, "a");
  EXPECT_THAT((*tensors)[1].shape, ElementsAre(3, 2));
  EXPECT_EQ((*tensors)[1].offset, data);
  EXPECT_FALSE((*tensors)[2].dtype.has_value());
  EXPECT_EQ((*tensors)[2].type_name, "F64");
  EXPECT_EQ((*tensors)[2].bytes, 8);
}

TEST(Safetensors, EmptyTensorsAndEmptyFiles) {
  const std::string header =
      absl::StrCat("{", Entry("e", "F32", "[0]", "[0,0]"), ",", Entry("w", "F32", "[1]", "[0,4]"),
                   ",", Entry("f", "F32", "[4611686018427387904,4,0]", "[4,4]"), "}");
  const auto tensors = ParseSafetensors(SafetensorsFile(header, "1234"), "f");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ((*tensors)[0].bytes, 0);
  EXPECT_EQ((*tensors)[2].bytes, 0);
  EXPECT_TRUE(ParseSafetensors(SafetensorsFile("{}", ""), "f").ok());
}

TEST(Safetensors, SaysWhatAFileIsInstead) {
  EXPECT_THAT(Error(""), AllOf(HasSubstr("found 0 bytes"), HasSubstr("file is empty")));
  EXPECT_THAT(Error("1234567"), AllOf(HasSubstr("at least 8 bytes"), HasSubstr("found 7 bytes")));
  EXPECT_THAT(Error("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
              HasSubstr("Git LFS pointer"));
  EXPECT_THAT(Error("<!DOCTYPE html><html>not found</html>"), HasSubstr("web page"));
  EXPECT_THAT(Error(GgufBuilder().Build()), HasSubstr("GGUF"));
  EXPECT_THAT(Error(std::string("PK\x03\x04 and a PyTorch checkpoint")), HasSubstr("zip archive"));
  EXPECT_THAT(Error(std::string(100, '\0')), HasSubstr("zeros"));
}

TEST(Safetensors, HeaderLength) {
  EXPECT_THAT(Error(Bytes<uint64_t>(3) + "{}"), HasSubstr("expected a header of 3 bytes"));
  for (const uint64_t length :
       {uint64_t{100'000'001}, uint64_t{1} << 32, uint64_t{1} << 63,
        std::numeric_limits<uint64_t>::max(), std::numeric_limits<uint64_t>::max() - 7}) {
    EXPECT_THAT(Error(Bytes(length) + "{}      "),
                HasSubstr(absl::StrCat("expected a header of ", length)));
  }
  EXPECT_THAT(Error(Bytes<uint64_t>(0) + "{}"), HasSubstr("not a JSON object"));
}

TEST(Safetensors, HeaderThatIsNoJson) {
  for (const absl::string_view header :
       {"{", "{\"w\"}", "{\"w\":}", "{}x", "{\"w\":{\"dtype\":\"F32\"", "{\"w\":{\"shape\":[1,]}}",
        "{\"\xff\":1}", "{\"w\":01}"}) {
    EXPECT_THAT(HeaderError(header), HasSubstr("bad header")) << header;
  }
  EXPECT_THAT(HeaderError("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(HeaderError(" {}"), HasSubstr("not a JSON object"));
  for (const size_t depth : {size_t{17}, size_t{10000}, size_t{1000000}}) {
    EXPECT_THAT(
        HeaderError(absl::StrCat("{\"w\":", std::string(depth, '['), std::string(depth, ']'), "}")),
        HasSubstr("bad header"));
    EXPECT_THAT(HeaderError(absl::StrCat("{\"w\":", std::string(depth, '['))),
                HasSubstr("bad header"));
  }
}

TEST(Safetensors, FieldsOfTheWrongType) {
  for (const absl::string_view value : {"3", "null", "[]", "\"F32\""}) {
    EXPECT_THAT(HeaderError(absl::StrCat("{\"w\":", value, "}")), HasSubstr("not an object"));
  }
  EXPECT_THAT(HeaderError(R"({"w":{"dtype":32,"shape":[],"data_offsets":[0,4]}})", 4),
              HasSubstr("tensor w: dtype is not a string"));
  EXPECT_THAT(HeaderError(R"({"w":{"dtype":"F32","shape":[]}})"), HasSubstr("lacks"));
  EXPECT_THAT(HeaderError(R"({"w":{}})"), HasSubstr("lacks"));
  EXPECT_THAT(HeaderError(absl::StrCat("{", Entry("w", "F33", "[1]", "[0,4]"), "}"), 4),
              HasSubstr("unknown dtype \"F33\""));
}

TEST(Safetensors, Twice) {
  EXPECT_THAT(HeaderError(absl::StrCat("{", Entry("w", "F32", "[1]", "[0,4]"), ",",
                                       Entry("w", "F32", "[1]", "[4,8]"), "}"),
                          8),
              HasSubstr("w is given twice"));
  EXPECT_THAT(
      HeaderError(R"({"w":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4),
      HasSubstr("dtype is given twice"));
  EXPECT_THAT(
      HeaderError(R"({"w":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", 4),
      HasSubstr("shape is given twice"));
  EXPECT_THAT(
      HeaderError(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}})",
                  4),
      HasSubstr("data_offsets is given twice"));
}

TEST(Safetensors, Shapes) {
  for (const absl::string_view shape : {"[-1,8]", "[2.0,2]", "[\"2\",2]", "[[2,2]]", "4", "null",
                                        "{}", "[9223372036854775808]", "[1,1,1,1,1,1,1,2,2]"}) {
    EXPECT_THAT(ShapeError(shape), HasSubstr("shape is not a list")) << shape;
  }
  EXPECT_THAT(ShapeError(absl::StrCat("[", absl::StrJoin(std::vector<int>(65, 1), ","), "]")),
              HasSubstr("shape is not a list of at most 8"));
  // Products that wrap around, some of them to 16 bytes or to nothing.
  for (const absl::string_view shape :
       {"[4611686018427387904,4]", "[4611686018427387905,4]", "[2305843009213693952,8]",
        "[9223372036854775807,9223372036854775807]", "[4294967296,4294967296]",
        "[4611686018427387908]"}) {
    EXPECT_THAT(ShapeError(shape), HasSubstr("overflows")) << shape;
  }
  EXPECT_THAT(ShapeError("[5]"), AllOf(HasSubstr("takes 20 bytes"), HasSubstr("span 16")));
  EXPECT_THAT(ShapeError("[]"), AllOf(HasSubstr("takes 4 bytes"), HasSubstr("span 16")));
  EXPECT_THAT(HeaderError(absl::StrCat("{", Entry("w", "F4", "[3]", "[0,1]"), "}"), 1),
              HasSubstr("span 1"));
}

TEST(Safetensors, Offsets) {
  for (const absl::string_view offsets :
       {"[16,0]", "[0]", "[0,16,32]", "[-1,15]", "[0,16.0]", "16", "[\"0\",\"16\"]", "null",
        "[18446744073709551595,18446744073709551611]"}) {
    EXPECT_THAT(OffsetsError(offsets), HasSubstr("data_offsets is not a pair")) << offsets;
  }
  EXPECT_THAT(OffsetsError("[9223372036854775791,9223372036854775807]"),
              HasSubstr("data_offsets overflow"));
  EXPECT_THAT(OffsetsError("[9223372036854775600,9223372036854775616]"),
              HasSubstr("expected 9223372036854775716 bytes, found 116"));
  EXPECT_THAT(OffsetsError("[0,12]"), HasSubstr("span 12"));
}

TEST(Safetensors, CutOffFilesAreNamedWithBothSizes) {
  const std::string header = absl::StrCat("{", Entry("a", "F32", "[4]", "[0,16]"), ",",
                                          Entry("b", "F32", "[4]", "[16,32]"), ",",
                                          Entry("c", "F32", "[4]", "[32,48]"), "}");
  const size_t whole = 8 + header.size() + 48;
  EXPECT_THAT(HeaderError(header, 20), AllOf(HasSubstr(absl::StrCat("expected ", whole, " bytes")),
                                             HasSubstr(absl::StrCat("found ", whole - 28)),
                                             HasSubstr("b, c"), HasSubstr("interrupted")));
  EXPECT_THAT(HeaderError(header, 47), AllOf(HasSubstr("Incomplete: c"), Not(HasSubstr("b, c"))));
  EXPECT_THAT(HeaderError(header, 49),
              AllOf(HasSubstr("1 trailing bytes"), HasSubstr(absl::StrCat("expected ", whole)),
                    HasSubstr(absl::StrCat("found ", whole + 1))));
  EXPECT_THAT(HeaderError("{}", 1), HasSubstr("1 trailing bytes"));
}

TEST(Safetensors, OverlapsAndGaps) {
  EXPECT_THAT(HeaderError(absl::StrCat("{", Entry("a", "F32", "[4]", "[0,16]"), ",",
                                       Entry("b", "F32", "[4]", "[12,28]"), "}"),
                          28),
              HasSubstr("tensor b at byte"));
  EXPECT_THAT(HeaderError(absl::StrCat("{", Entry("a", "F32", "[4]", "[0,16]"), ",",
                                       Entry("b", "F32", "[4]", "[0,16]"), "}"),
                          16),
              HasSubstr("overlaps"));
  EXPECT_THAT(HeaderError(absl::StrCat("{", Entry("a", "F32", "[1]", "[0,4]"), ",",
                                       Entry("b", "F32", "[1]", "[8,12]"), "}"),
                          12),
              HasSubstr("4 bytes between tensors"));
  EXPECT_THAT(HeaderError(absl::StrCat("{", Entry("a", "F32", "[1]", "[4,8]"), "}"), 8),
              HasSubstr("4 bytes between tensors"));
}

}  // namespace
}  // namespace heddle
