#include "runtime/text/pattern.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> FindAll(const Pattern& pattern, absl::string_view text) {
  std::vector<Pattern::Match> matches;
  CHECK_OK(pattern.FindAll(text, &matches));
  std::vector<std::string> found;
  for (const Pattern::Match& match : matches) {
    found.emplace_back(text.substr(match.begin, match.end - match.begin));
  }
  return found;
}

std::vector<std::string> FindAll(absl::string_view expression, absl::string_view text) {
  const absl::StatusOr<Pattern> pattern = Pattern::Regex(expression);
  CHECK_OK(pattern.status());
  return FindAll(*pattern, text);
}

TEST(PatternTest, SpacesAreUnicodeWhiteSpace) {
  EXPECT_THAT(FindAll(R"(\s+)", "a\u0085b\u2029c\u3000d\u180Ee\u200Bf"),
              ElementsAre("\u0085", "\u2029", "\u3000"));
  EXPECT_THAT(FindAll(R"([^\s]+)", "a\u2029b\u180Ec"), ElementsAre("a", "b\u180Ec"));
  EXPECT_THAT(FindAll(R"(\S+)", "a b\u00A0c"), ElementsAre("a", "b", "c"));
}

TEST(PatternTest, PropertiesKnowYoungCharacters) {
  // U+1FA77 is a symbol since Unicode 15, U+31350 a letter, U+11F50 a digit.
  EXPECT_THAT(FindAll(R"(\p{S}+)", "a🩷b😀"), ElementsAre("🩷", "😀"));
  EXPECT_THAT(FindAll(R"([^\p{S}]+)", "a🩷b"), ElementsAre("a", "b"));
  EXPECT_THAT(FindAll(R"(\P{S}+)", "a🩷b"), ElementsAre("a", "b"));
  EXPECT_THAT(FindAll(R"(\p{^So}+)", "a🩷b"), ElementsAre("a", "b"));
  EXPECT_THAT(FindAll(R"(\p{L}+)", "\U00031350!"), ElementsAre("\U00031350"));
  EXPECT_THAT(FindAll(R"(\p{Han}+)", "漢\U00031350々a"), ElementsAre("漢\U00031350々"));
  EXPECT_THAT(FindAll(R"(\d)", "1\U00011F50x"), ElementsAre("1", "\U00011F50"));
}

TEST(PatternTest, ScriptsDoNotIncludeTheirExtensions) {
  // U+30FC, the mark of long vowels, is used with Hiragana but is of no script.
  EXPECT_THAT(FindAll(R"(\p{Hiragana}+)", "あー"), ElementsAre("あ"));
}

TEST(PatternTest, CaseFoldingIsUnicodes) {
  EXPECT_THAT(FindAll(R"((?i:'s|'k))", "'s'S'\u017F'\u212A's"),
              ElementsAre("'s", "'S", "'\u017F", "'\u212A", "'s"));
}

TEST(PatternTest, AnchorsMatchAtLines) {
  EXPECT_THAT(FindAll(R"(^a)", "a\nab\ra"), ElementsAre("a", "a"));
  EXPECT_THAT(FindAll(R"(a$)", "a\nba\r\na"), ElementsAre("a", "a"));
}

TEST(PatternTest, EmptyMatchesNeverFollowAMatch) {
  EXPECT_THAT(FindAll(R"(b*)", "abbé"), ElementsAre("", "bb", ""));
  EXPECT_THAT(FindAll(R"((?=b))", "abéb"), ElementsAre("", ""));
}

TEST(PatternTest, LiteralsHaveNoSyntax) {
  EXPECT_THAT(FindAll(*Pattern::Literal(".*[\\"), "a.*[\\.*[\\"), ElementsAre(".*[\\", ".*[\\"));
  EXPECT_THAT(Pattern::Literal("").status().message(), HasSubstr("empty"));
}

TEST(PatternTest, RefusesWhatEnginesReadDifferently) {
  for (const char* expression :
       {R"(\w+)", R"(\b)",     R"(\h)",   R"(\X)",  R"(\1)",  R"(\k<a>)",    R"(\x80)", R"(\u12)",
        R"(\pL)", R"(\p{L&})", R"(\p{L)", "[a[b]]", "[a&&b]", "[[:alpha:]]", "[]a]",    "[a",
        "(?m:.)", "(?<n>a)",   "(*UCP)",  "a{,2}",  "a{2}+",  "a{2}?",       "a{",      "\\"}) {
    const absl::Status status = Pattern::Regex(expression).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << expression;
    EXPECT_THAT(std::string(status.message()), HasSubstr(expression));
  }
}

TEST(PatternTest, RefusesWhatIsNoExpression) {
  for (const char* expression : {"", "(", "a)", "*", "[b-a]", R"(\p{Klingon})", "(?<=a*)b"}) {
    EXPECT_EQ(Pattern::Regex(expression).status().code(), absl::StatusCode::kInvalidArgument)
        << expression;
  }
  EXPECT_FALSE(Pattern::Regex(std::string(1 << 17, 'a')).ok());
  EXPECT_FALSE(Pattern::Regex("((a{1000}){1000}){1000}").ok());
  EXPECT_FALSE(Pattern::Regex(std::string(1000, '(') + std::string(1000, ')')).ok());
}

TEST(PatternTest, EndlessBacktrackingGivesUp) {
  const absl::StatusOr<Pattern> pattern = Pattern::Regex("(?:(?:a|b|ab)+)+c");
  ASSERT_TRUE(pattern.ok());
  std::vector<Pattern::Match> matches;
  std::string text;
  for (int i = 0; i < 40; ++i) text += "ab";
  // Without a c the engine would see at once that there is no match.
  EXPECT_THAT(pattern->FindAll(text + "dc", &matches).message(), HasSubstr("gave up"));
}

TEST(PatternTest, LongTextsNeedNoStack) {
  std::string text;
  for (int i = 0; i < 200000; ++i) absl::StrAppend(&text, i % 2 ? "a" : "é");
  EXPECT_THAT(FindAll("(?:a|é)+", text), ElementsAre(text));
}

}  // namespace
}  // namespace heddle
