// When a sequence ends, and what text it has given by then.
#include "runtime/output_sequence.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/runtime/text/tiny_tokenizer.h"

namespace heddle {
namespace {

constexpr int32_t kEos = 5;

// Ids 0 to 7.
const TinyTokenizer& Words() {
  static const TinyTokenizer* const tokenizer = new TinyTokenizer({
      {.text = "ab", .bytes = "ab"},
      {.text = "\n", .bytes = "\n"},
      {.text = "User", .bytes = "User"},
      {.text = ":", .bytes = ":"},
      {.text = "as", .bytes = "as"},
      {.text = "<eos>", .bytes = "<eos>", .special = true},
      {.text = "half", .bytes = "\xf0\x9f"},
      {.text = "rest", .bytes = "\x98\x80"},
  });
  return *tokenizer;
}

struct Result {
  std::string text;
  FinishReason reason = FinishReason::kUnfinished;
  size_t num_tokens = 0;
};

Result Generate(const SamplingParams& params, const std::vector<int32_t>& ids,
                int64_t max_tokens = 100, const Tokenizer* tokenizer = &Words()) {
  OutputSequence sequence(params, tokenizer, {kEos}, max_tokens);
  Result result;
  for (const int32_t id : ids) {
    const OutputSequence::Piece piece = sequence.Push(id);
    ++result.num_tokens;
    result.text += piece.text;
    result.reason = piece.finish_reason;
    if (result.reason != FinishReason::kUnfinished) return result;
  }
  return result;
}

TEST(OutputSequence, EosEndsItAndLeavesNoText) {
  const Result result = Generate(SamplingParams(), {0, 0, kEos, 0});
  EXPECT_EQ(result.text, "abab");
  EXPECT_EQ(result.reason, FinishReason::kStop);
  EXPECT_EQ(result.num_tokens, 3u);
}

TEST(OutputSequence, EosIsIgnoredIfAskedFor) {
  SamplingParams params;
  params.ignore_eos = true;
  const Result result = Generate(params, {0, kEos, 0}, 3);
  EXPECT_EQ(result.text, "abab");
  EXPECT_EQ(result.reason, FinishReason::kLength);
}

TEST(OutputSequence, LengthEndsItWithAllItsText) {
  const Result result = Generate(SamplingParams(), {0, 4, 0, 0}, 3);
  EXPECT_EQ(result.text, "abasab");
  EXPECT_EQ(result.reason, FinishReason::kLength);
  EXPECT_EQ(result.num_tokens, 3u);
}

TEST(OutputSequence, AStopStringAcrossTokensIsCutOffAndNeverShown) {
  SamplingParams params;
  params.stop = {"\nUser:"};
  OutputSequence sequence(params, &Words(), {kEos}, 100);
  EXPECT_EQ(sequence.Push(0).text, "ab");
  EXPECT_EQ(sequence.Push(1).text, "");
  EXPECT_EQ(sequence.Push(2).text, "");
  const OutputSequence::Piece last = sequence.Push(3);
  EXPECT_EQ(last.text, "");
  EXPECT_EQ(last.finish_reason, FinishReason::kStop);
}

TEST(OutputSequence, TextHeldForAStopStringComesWhenTheSequenceEndsOtherwise) {
  SamplingParams params;
  params.stop = {"assist"};
  EXPECT_EQ(Generate(params, {0, 4, kEos}).text, "abas");
  EXPECT_EQ(Generate(params, {0, 4}, 2).text, "abas");
  OutputSequence sequence(params, &Words(), {kEos}, 100);
  EXPECT_EQ(sequence.Push(4).text, "");
  EXPECT_EQ(sequence.End(FinishReason::kAbort).text, "as");
}

TEST(OutputSequence, AStopStringThatIsASpecialTokenStopsByItsId) {
  SamplingParams params;
  params.ignore_eos = true;
  params.stop = {"<eos>"};
  const Result result = Generate(params, {0, kEos, 0});
  EXPECT_EQ(result.text, "ab");
  EXPECT_EQ(result.reason, FinishReason::kStop);
}

TEST(OutputSequence, NothingEndsItBeforeMinTokens) {
  SamplingParams params;
  params.min_tokens = 4;
  params.stop = {"\n"};
  params.stop_token_ids = {3};
  const Result result = Generate(params, {1, 3, kEos, 1, 0, 3, 0});
  EXPECT_EQ(result.reason, FinishReason::kStop);
  EXPECT_EQ(result.num_tokens, 4u);
  EXPECT_EQ(result.text, "\n:");
}

TEST(OutputSequence, HalfACharacterWaitsForTheRest) {
  OutputSequence sequence(SamplingParams(), &Words(), {kEos}, 100);
  EXPECT_EQ(sequence.Push(6).text, "");
  EXPECT_EQ(sequence.Push(7).text, "\xf0\x9f\x98\x80");
  EXPECT_EQ(sequence.Push(6).text, "");
  EXPECT_EQ(sequence.End(FinishReason::kLength).text, "\xef\xbf\xbd");
}

TEST(OutputSequence, WithoutATokenizerThereAreIdsAlone) {
  SamplingParams params;
  params.stop = {"ab"};
  const Result result = Generate(params, {0, 0, kEos}, 100, nullptr);
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(result.reason, FinishReason::kStop);
  EXPECT_EQ(result.num_tokens, 3u);
}

}  // namespace
}  // namespace heddle
