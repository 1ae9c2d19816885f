#include "runtime/text/stream_decoder.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/text/utf8.h"
#include "tests/runtime/text/tiny_tokenizer.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;

std::vector<Token> Tokens(const std::vector<std::string>& texts) {
  std::vector<Token> tokens;
  for (const std::string& text : texts) tokens.push_back({.text = text, .bytes = text});
  return tokens;
}

std::vector<std::string> Chunks(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                                bool skip_special_tokens = true) {
  StreamDecoder decoder(&tokenizer, skip_special_tokens);
  std::vector<std::string> chunks;
  for (const int32_t id : ids) chunks.push_back(decoder.Push(id));
  chunks.push_back(decoder.Flush());
  return chunks;
}

TEST(StreamDecoderTest, WaitsUntilACodePointIsWhole) {
  const TinyTokenizer tokenizer(Tokens({"\xF0", "\x9F", "\x98", "\x80", "a"}));
  EXPECT_THAT(Chunks(tokenizer, {0, 1, 2, 3, 4}), ElementsAre("", "", "", "😀", "a", ""));
}

TEST(StreamDecoderTest, NothingIsSentTwice) {
  const TinyTokenizer tokenizer(Tokens({"A", "你", "\xE5\xA5", "ab", "\xBD"}));
  EXPECT_THAT(Chunks(tokenizer, {0, 1, 2, 3}), ElementsAre("A", "你", "", "\uFFFDab", ""));
  EXPECT_THAT(Chunks(tokenizer, {1, 2, 4, 3}), ElementsAre("你", "", "好", "ab", ""));
}

TEST(StreamDecoderTest, TheEndReplacesHalfACharacter) {
  const std::vector<Token> tokens = Tokens({"a", "\xE4\xBD", "\xFF"});
  EXPECT_THAT(Chunks(TinyTokenizer(tokens), {0, 1}), ElementsAre("a", "", "\uFFFD"));
  EXPECT_THAT(Chunks(TinyTokenizer(tokens), {2, 0}), ElementsAre("\uFFFD", "a", ""));
  const TinyTokenizer each(tokens, {.replace_each_byte = true});
  EXPECT_THAT(Chunks(each, {0, 1}), ElementsAre("a", "", "\uFFFD\uFFFD"));
  EXPECT_THAT(Chunks(each, {1, 0}), ElementsAre("", "\uFFFD\uFFFDa", ""));
}

TEST(StreamDecoderTest, IdsWithoutTextAddNothing) {
  const TinyTokenizer tokenizer(Tokens({"a", "\xC3", "\xA9"}));
  EXPECT_THAT(Chunks(tokenizer, {1, 3, -1, 1 << 30, 2}), ElementsAre("", "", "", "", "é", ""));
  EXPECT_EQ(tokenizer.TokenBytes(271), "");
  EXPECT_FALSE(tokenizer.IsSpecial(271));
}

TEST(StreamDecoderTest, SpecialTokensAreLeftOutOnRequest) {
  const TinyTokenizer tokenizer(
      {{.text = "<s>", .bytes = "<s>", .special = true}, {.text = "a", .bytes = "a"}});
  EXPECT_THAT(Chunks(tokenizer, {0, 1, 0}), ElementsAre("", "a", "", ""));
  EXPECT_THAT(Chunks(tokenizer, {0, 1, 0}, false), ElementsAre("<s>", "a", "<s>", ""));
}

TEST(StreamDecoderTest, LeadingSpaceRules) {
  const std::vector<Token> tokens = {{.text = "<s>", .bytes = "<s>", .special = true},
                                     {.text = "▁", .bytes = " "},
                                     {.text = "▁▁a", .bytes = "  a"},
                                     {.text = " u", .bytes = " u"}};
  const auto decode = [&](LeadingSpace rule, std::vector<int32_t> ids, bool skip = true) {
    return TinyTokenizer(tokens, {.leading_space = rule}).Decode(ids, skip);
  };
  EXPECT_EQ(decode(LeadingSpace::kKeep, {0, 1, 2, 1}), "   a ");
  EXPECT_EQ(decode(LeadingSpace::kDropOneSpace, {0, 1, 2, 1}), "  a ");
  EXPECT_EQ(decode(LeadingSpace::kDropOneSpace, {0, 1, 2}, false), "<s>   a");
  EXPECT_EQ(decode(LeadingSpace::kDropOneSpace, {3, 3}), "u u");
  EXPECT_EQ(decode(LeadingSpace::kDropOneMarkerEach, {1, 1, 2, 1}), " a ");
  EXPECT_EQ(decode(LeadingSpace::kDropOneMarkerEach, {3, 2}), " u  a");
  EXPECT_EQ(decode(LeadingSpace::kDropFirstMarkers, {2, 2}), "a  a");
  EXPECT_EQ(decode(LeadingSpace::kDropFirstMarkers, {1, 2}), "  a");
}

TEST(StreamDecoderTest, AnyBytesGiveValidChunksOfTheWholeText) {
  std::vector<std::string> texts;
  for (int byte = 0; byte < 256; ++byte) texts.push_back(std::string(1, static_cast<char>(byte)));
  for (const char* text : {"é", "好", "😀", "\xF0\x9F", "\x98\x80", "a\xE5", "\xA5\xBD z"}) {
    texts.push_back(text);
  }
  const TinyTokenizer tokenizer(Tokens(texts));
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    // Half of the ids are pieces of characters, so that some of them meet.
    std::vector<int32_t> ids(random() % 24);
    for (int32_t& id : ids) id = random() % 2 ? 256 + random() % 7 : random() % texts.size();
    std::string bytes;
    for (const int32_t id : ids) bytes += texts[id];
    std::string streamed;
    for (const std::string& chunk : Chunks(tokenizer, ids)) {
      EXPECT_EQ(ToValidUtf8(chunk), chunk);
      streamed += chunk;
    }
    EXPECT_EQ(streamed, ToValidUtf8(bytes));
    EXPECT_EQ(streamed, tokenizer.Decode(ids, true));
  }
}

}  // namespace
}  // namespace heddle
