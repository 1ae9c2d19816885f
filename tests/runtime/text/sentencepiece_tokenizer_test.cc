#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/text/tokenizer.h"
#include "tests/runtime/text/tokenizer_fixture.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SentencePieceTokenizerTest, AddsBosUnlessTheConfigSaysOtherwise) {
  const std::string model = FixtureFile("sp_llama", "tokenizer.model.xz");
  const auto encode = [&](absl::string_view config) {
    return *(*ParseSentencePiece(model, config))->Encode("", /*add_special_tokens=*/true);
  };
  EXPECT_THAT(encode(""), ElementsAre(1));
  EXPECT_THAT(encode("{}"), ElementsAre(1));
  EXPECT_THAT(encode(R"({"add_bos_token": false, "add_eos_token": true})"), ElementsAre(2));
}

TEST(SentencePieceTokenizerTest, KnowsItsSpecialTokens) {
  const auto tokenizer = LoadFixture("sp_llama");
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_THAT(tokenizer->eos_ids(), ElementsAre(2));
  EXPECT_TRUE(tokenizer->IsSpecial(1));
  EXPECT_FALSE(tokenizer->IsSpecial(300));
  EXPECT_EQ(tokenizer->TokenBytes(*tokenizer->TokenId("<0x0A>")), "\n");
  const std::vector<int32_t> ids = {1, 2};
  EXPECT_EQ(tokenizer->Decode(ids, false), "<s></s>");
}

TEST(SentencePieceTokenizerTest, GivesTheIdsOfTheSameModelAsTokenizerJson) {
  const auto bare = LoadFixture("sp_llama");
  const auto json = LoadFixture("llama2");
  for (const char* text : {"a", "Hello, world!", "  two  spaces ", "é好😀\n\t1234", "don't"}) {
    EXPECT_EQ(*bare->Encode(text, true), *json->Encode(text, true)) << text;
  }
}

TEST(SentencePieceTokenizerTest, RefusesWhatIsNoModel) {
  const std::string model = FixtureFile("sp_llama", "tokenizer.model.xz");
  for (const std::string& broken :
       {std::string(), std::string("no model"), model.substr(0, model.size() / 2)}) {
    const absl::Status status = ParseSentencePiece(broken, "").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("tokenizer.model: not a model"));
  }
  EXPECT_THAT(ParseSentencePiece(model, R"({"eos_token": "<x>"})").status().message(),
              HasSubstr("\"<x>\" is not in the vocabulary"));
}

}  // namespace
}  // namespace heddle
