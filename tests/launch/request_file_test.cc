#include "launch/request_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Refusal(const std::string& json) {
  const RequestLine line = ParseRequestLine(json, SamplingParams(), "fallback");
  EXPECT_FALSE(line.request.ok()) << json;
  return std::string(line.request.status().message());
}

TEST(RequestLine, ReadsEveryField) {
  const RequestLine line = ParseRequestLine(
      R"({"id":"a","prompt":"Once","max_tokens":5,"min_tokens":1,"temperature":0.5,"top_k":40,
          "top_p":0.9,"min_p":0.05,"repetition_penalty":1.1,"presence_penalty":0.5,
          "frequency_penalty":-0.5,"seed":18446744073709551615,"n":2,"logprobs":3,
          "ignore_eos":true,"stop":["\n","END"],"stop_token_ids":[1,2],
          "skip_special_tokens":false})",
      SamplingParams(), "fallback");
  ASSERT_TRUE(line.request.ok()) << line.request.status();
  EXPECT_EQ(line.id, "a");
  EXPECT_EQ(std::get<std::string>(line.request->prompt), "Once");
  const SamplingParams& params = line.request->params;
  EXPECT_EQ(params.max_tokens, 5);
  EXPECT_EQ(params.min_tokens, 1);
  EXPECT_EQ(params.temperature, 0.5);
  EXPECT_EQ(params.top_k, 40);
  EXPECT_EQ(params.top_p, 0.9);
  EXPECT_EQ(params.min_p, 0.05);
  EXPECT_EQ(params.repetition_penalty, 1.1);
  EXPECT_EQ(params.presence_penalty, 0.5);
  EXPECT_EQ(params.frequency_penalty, -0.5);
  EXPECT_EQ(params.seed, 18446744073709551615u);
  EXPECT_EQ(params.n, 2);
  EXPECT_EQ(params.logprobs, 3);
  EXPECT_TRUE(params.ignore_eos);
  EXPECT_THAT(params.stop, ElementsAre("\n", "END"));
  EXPECT_THAT(params.stop_token_ids, ElementsAre(1, 2));
  EXPECT_FALSE(params.skip_special_tokens);
}

TEST(RequestLine, TakesTheRestFromTheDefaults) {
  SamplingParams defaults;
  defaults.temperature = 0.25;
  const RequestLine line =
      ParseRequestLine(R"({"prompt_token_ids":[3,1],"max_tokens":null})", defaults, "7");
  ASSERT_TRUE(line.request.ok()) << line.request.status();
  EXPECT_EQ(line.request->id, "7");
  EXPECT_EQ(line.request->params.temperature, 0.25);
  EXPECT_EQ(line.request->params.max_tokens, std::nullopt);
  EXPECT_THAT(std::get<std::vector<int32_t>>(line.request->prompt), ElementsAre(3, 1));
}

TEST(RequestLine, SaysWhatIsWrong) {
  EXPECT_THAT(Refusal(""), HasSubstr("not valid JSON"));
  EXPECT_THAT(Refusal("{\"prompt\":\"a\"} x"), HasSubstr("not valid JSON"));
  EXPECT_THAT(Refusal("[1]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(Refusal("{}"), HasSubstr("found neither"));
  EXPECT_THAT(Refusal(R"({"prompt":"a","prompt_token_ids":[1]})"), HasSubstr("found both"));
  EXPECT_THAT(Refusal(R"({"prompt":7})"), HasSubstr("\"prompt\": expected a string, found number"));
  EXPECT_THAT(Refusal(R"({"prompt":"a","top_k":"5"})"),
              HasSubstr("\"top_k\": expected a whole number, found string"));
  EXPECT_THAT(Refusal(R"({"prompt":"a","top_k":1.5})"), HasSubstr("\"top_k\""));
  EXPECT_THAT(Refusal(R"({"prompt":"a","logprobs":true})"),
              HasSubstr("\"logprobs\": expected a whole number, found boolean"));
  EXPECT_THAT(Refusal(R"({"prompt":"a","seed":-1})"), HasSubstr("\"seed\""));
  EXPECT_THAT(Refusal(R"({"prompt":"a","max_tokens":99999999999999999999})"),
              HasSubstr("\"max_tokens\""));
  EXPECT_THAT(Refusal(R"({"prompt_token_ids":[1,4294967296]})"), HasSubstr("not a token id"));
  EXPECT_THAT(Refusal(R"({"prompt":"a","response_format":{}})"),
              HasSubstr("unknown field \"response_format\""));
  EXPECT_THAT(Refusal(R"({"prompt":"a","top_p":1,"top_p":0.5})"), HasSubstr("given twice"));
  EXPECT_THAT(Refusal(R"({"prompt":)" + std::string(10000, '[') + std::string(10000, ']') + "}"),
              HasSubstr("nested too deeply"));
}

TEST(RequestLine, ABadLineKeepsItsId) {
  const RequestLine line =
      ParseRequestLine(R"({"id":"mine","prompt":"a","nonsense":1})", SamplingParams(), "0");
  EXPECT_FALSE(line.request.ok());
  EXPECT_EQ(line.id, "mine");
}

TEST(RequestLines, ErrorsNameTheLineAndOthersAreRead) {
  const std::vector<RequestLine> lines = ParseRequestLines(
      "in.jsonl", {R"({"prompt":"a"})", "", "{", R"({"prompt":"b"})"}, SamplingParams());
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_TRUE(lines[0].request.ok());
  EXPECT_THAT(std::string(lines[1].request.status().message()), HasSubstr("in.jsonl:3: "));
  EXPECT_EQ(lines[2].request->id, "2");
}

TEST(RequestLines, APlainTextIsAPromptALine) {
  const std::vector<RequestLine> lines =
      ParseRequestLines("in.txt", {"first", "", "{third\r"}, SamplingParams());
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(std::get<std::string>(lines[0].request->prompt), "first");
  EXPECT_EQ(std::get<std::string>(lines[1].request->prompt), "");
  EXPECT_EQ(std::get<std::string>(lines[2].request->prompt), "{third");
}

TEST(ScoreLine, ReadsIdsOrTextAndNothingElse) {
  const RequestLine ids = ParseScoreLine(R"({"id":"s","token_ids":[4,5]})", "0");
  ASSERT_TRUE(ids.request.ok()) << ids.request.status();
  EXPECT_TRUE(ids.request->params.prompt_logprobs);
  EXPECT_EQ(ids.request->params.max_tokens, 0);
  EXPECT_TRUE(ParseScoreLine(R"({"text":"words"})", "0").request.ok());
  EXPECT_FALSE(ParseScoreLine(R"({"text":"words","temperature":1})", "0").request.ok());
  EXPECT_FALSE(ParseScoreLine(R"({"prompt":"words"})", "0").request.ok());
}

TEST(TextLines, AMissingFileIsNamed) {
  EXPECT_THAT(std::string(ReadTextLines("/nowhere.jsonl").status().message()),
              HasSubstr("/nowhere.jsonl"));
}

}  // namespace
}  // namespace heddle
