#include "runtime/text/stop_matcher.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/runtime/text/tiny_tokenizer.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;

struct Result {
  std::vector<std::string> chunks;
  std::string text;
  std::optional<std::string> matched;
};

Result Match(std::vector<std::string> stops, const std::vector<std::string>& pieces,
             size_t min_pieces = 0) {
  StopMatcher matcher(std::move(stops));
  Result result;
  for (size_t i = 0; i < pieces.size() && !matcher.matched().has_value(); ++i) {
    result.chunks.push_back(matcher.Push(pieces[i], /*may_stop=*/i + 1 >= min_pieces));
  }
  result.chunks.push_back(matcher.Flush());
  for (const std::string& chunk : result.chunks) result.text += chunk;
  result.matched = matcher.matched();
  return result;
}

// The rule, written down naively: the first stop string to become whole.
std::string CutAtStop(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (stop.size() <= end && text.compare(end - stop.size(), stop.size(), stop) == 0) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) return text.substr(0, end - longest);
  }
  return text;
}

TEST(StopMatcherTest, StopAcrossTokensIsNeverPartlyOut) {
  const Result result = Match({"DEFGHIJ"}, {"ABC", "DEF", "G", "HI", "JK"});
  EXPECT_THAT(result.chunks, ElementsAre("ABC", "", "", "", "", ""));
  EXPECT_EQ(result.matched, "DEFGHIJ");
}

TEST(StopMatcherTest, FalseAlarmGoesOutWhole) {
  const Result result = Match({"DEFGHIJ"}, {"ABC", "DEF", "G", "HI", "X", "Y"});
  EXPECT_THAT(result.chunks, ElementsAre("ABC", "", "", "", "DEFGHIX", "Y", ""));
  EXPECT_EQ(result.matched, std::nullopt);
}

TEST(StopMatcherTest, EverySplitGivesTheTextOfNoSplit) {
  const std::string text = "ab\nUser:";
  for (const std::vector<std::string>& stops : std::vector<std::vector<std::string>>{
           {"\nUser:"}, {"\n", "User:"}, {"\nUser: "}, {"b\nX", "User"}, {":"}}) {
    const std::string expected = CutAtStop(text, stops);
    for (uint32_t cuts = 0; cuts < 1u << (text.size() - 1); ++cuts) {
      std::vector<std::string> pieces = {""};
      for (size_t i = 0; i < text.size(); ++i) {
        pieces.back() += text[i];
        if (cuts >> i & 1) pieces.push_back("");
      }
      EXPECT_EQ(Match(stops, pieces).text, expected) << "cuts " << cuts << " stop " << stops[0];
    }
  }
}

TEST(StopMatcherTest, HeldTextComesOutAtTheEnd) {
  EXPECT_THAT(Match({"assistant"}, {"x", "as"}).chunks, ElementsAre("x", "", "as"));
}

TEST(StopMatcherTest, HoldsNoMoreThanThePieceThatMayBeginAStop) {
  const std::vector<std::string> stops = {"a long stop string", "another one", "###"};
  EXPECT_THAT(Match(stops, {"one", " two", " three", "#", "4", "##", "5"}).chunks,
              ElementsAre("one", " two", " three", "", "#4", "", "##5", ""));
}

TEST(StopMatcherTest, ChunksEndWhereTokensEnd) {
  EXPECT_THAT(Match({">END"}, {"<tool>", "x"}).chunks, ElementsAre("", "<tool>x", ""));
  EXPECT_THAT(Match({">END"}, {"<tool>", "END"}).chunks, ElementsAre("", "<tool", ""));
}

TEST(StopMatcherTest, TheFirstToBecomeWholeWins) {
  EXPECT_EQ(Match({"abcd", "c"}, {"xabcd"}).text, "xab");
  EXPECT_EQ(Match({"c", "abc", "bc"}, {"xabc"}).matched, "abc");
  EXPECT_EQ(Match({"abab"}, {"ab", "ac", "ab", "ab", "z"}).text, "abac");
}

TEST(StopMatcherTest, NothingStopsBeforeTheMinimum) {
  EXPECT_THAT(Match({"\n"}, {"\n", "a", "\n", "b", "\n", "c"}, 4).chunks,
              ElementsAre("\n", "a", "\n", "b", "", ""));
  // A stop string that began before the minimum counts once it is whole after it.
  EXPECT_EQ(Match({"aab"}, {"a", "a", "b", "c"}, 3).text, "");
  EXPECT_EQ(Match({"aa"}, {"a", "a", "a", "c"}, 3).text, "a");
}

TEST(StopMatcherTest, EmptyStopStringsNeverStop) {
  EXPECT_EQ(Match({"", "b"}, {"a", "", "b"}).text, "a");
  EXPECT_EQ(Match({""}, {"a", "b"}).text, "ab");
}

TEST(StopMatcherTest, RandomTextsAgreeWithTheRule) {
  std::mt19937 random(7);
  const auto word = [&](size_t max_size) {
    std::string text;
    for (size_t n = random() % (max_size + 1); n > 0; --n) text += "ab"[random() % 2];
    return text;
  };
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> stops(1 + random() % 3);
    for (std::string& stop : stops) stop = absl::StrCat("a", word(4));
    std::vector<std::string> pieces(random() % 8);
    std::string text;
    for (std::string& piece : pieces) text += piece = word(3);
    EXPECT_EQ(Match(stops, pieces).text, CutAtStop(text, stops));
  }
}

TEST(StopMatcherTest, SpecialTokensAreStoppedAtById) {
  const TinyTokenizer tokenizer(
      {{.text = "a", .bytes = "a"}, {.text = "<end>", .bytes = "<end>", .special = true}});
  const std::vector<std::string> stops = {"a", "<end>", "b"};
  EXPECT_THAT(SpecialStopIds(tokenizer, stops), ElementsAre(1));
}

}  // namespace
}  // namespace heddle
