#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/text/tokenizer.h"
#include "tests/runtime/text/tokenizer_fixture.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

// Sentencepiece-style: "ab" and "abc" merge; every byte has a token.
Json PieceJson() {
  Json vocab = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  const auto add = [&](const std::string& text) { vocab.emplace(text, vocab.size()); };
  for (int byte = 0; byte < 256; ++byte) {
    char text[8];
    std::snprintf(text, sizeof(text), "<0x%02X>", byte);
    add(text);
  }
  for (const char* text : {"▁", "a", "b", "c", "ab", "abc", "▁a", "▁ab"}) add(text);
  const auto special = [](int id, const char* content) {
    return Json{{"id", id}, {"content", content}, {"special", true}, {"normalized", false}};
  };
  return {{"added_tokens", {special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")}},
          {"normalizer", nullptr},
          {"pre_tokenizer", nullptr},
          {"post_processor", nullptr},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"model",
           {{"type", "BPE"},
            {"byte_fallback", true},
            {"unk_token", "<unk>"},
            {"vocab", vocab},
            {"merges", {"a b", "ab c", "▁ a", "▁a b"}}}}};
}

const Json kMetaspaceFirst = {
    {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}, {"split", false}};

std::unique_ptr<Tokenizer> Make(const Json& json, const Json& config = nullptr) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      ParseTokenizerJson(json.dump(), config.is_null() ? "" : config.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

// The texts of the ids of `text`, as the vocabulary spells them.
std::vector<std::string> Tokens(const Tokenizer& tokenizer, absl::string_view text,
                                bool add_special_tokens = false) {
  const absl::StatusOr<Ids> ids = tokenizer.Encode(text, add_special_tokens);
  EXPECT_TRUE(ids.ok()) << ids.status();
  std::vector<std::string> tokens;
  for (const int32_t id : *ids) tokens.push_back(tokenizer.vocabulary().token(id).text);
  return tokens;
}

int CountOf(const std::vector<std::string>& tokens, const std::string& token) {
  return static_cast<int>(std::count(tokens.begin(), tokens.end(), token));
}

// --- The start and the end of a text ---------------------------------------------

Json Template(Json single) {
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"special_tokens",
           {{"<s>", {{"id", "<s>"}, {"ids", {1}}, {"tokens", {"<s>"}}}},
            {"</s>", {{"id", "</s>"}, {"ids", {2}}, {"tokens", {"</s>"}}}}}}};
}
const Json kText = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
const Json kBos = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
const Json kEos = {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}};

TEST(TokenizerJsonTest, TemplateSurroundsTheText) {
  Json json = PieceJson();
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors", {{{"type", "ByteLevel"}}, Template({kBos, kText, kEos})}}};
  const auto tokenizer = Make(json);
  EXPECT_THAT(Tokens(*tokenizer, "ab", true), ElementsAre("<s>", "ab", "</s>"));
  EXPECT_THAT(Tokens(*tokenizer, "ab", false), ElementsAre("ab"));
  EXPECT_THAT(Tokens(*tokenizer, "", true), ElementsAre("<s>", "</s>"));
  EXPECT_THAT(Tokens(*tokenizer, "", false), IsEmpty());
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_THAT(tokenizer->eos_ids(), ElementsAre(2));
}

TEST(TokenizerJsonTest, ConfigWinsOverTheTemplate) {
  Json json = PieceJson();
  const Json names = {{"bos_token", "<s>"}, {"eos_token", {{"content", "</s>"}}}};
  const auto with = [&](Json single, Json flags) {
    json["post_processor"] = single.is_null() ? Json() : Template(single);
    flags.update(names);
    return Tokens(*Make(json, flags), "ab", true);
  };
  EXPECT_THAT(with(nullptr, {{"add_bos_token", true}}), ElementsAre("<s>", "ab"));
  EXPECT_THAT(with({kBos, kText}, {{"add_bos_token", true}}), ElementsAre("<s>", "ab"));
  EXPECT_THAT(with({kBos, kText}, {{"add_bos_token", false}}), ElementsAre("ab"));
  EXPECT_THAT(with({kBos, kText}, Json::object()), ElementsAre("<s>", "ab"));
  EXPECT_THAT(with({kBos, kText}, {{"add_eos_token", true}}), ElementsAre("<s>", "ab", "</s>"));
  EXPECT_THAT(with(nullptr, Json::object()), ElementsAre("ab"));
}

TEST(TokenizerJsonTest, ExactlyOneBosWhicheverWayTheTextComes) {
  // DeepSeek's file has no template; its config asks for BOS.
  for (const char* fixture : {"deepseek_v3", "llama3", "llama2"}) {
    const auto tokenizer = LoadFixture(fixture);
    ASSERT_TRUE(tokenizer->bos_id().has_value());
    const std::string bos = tokenizer->vocabulary().token(*tokenizer->bos_id()).text;
    // Raw text gets one; text of a chat template spells its own.
    EXPECT_EQ(CountOf(Tokens(*tokenizer, "hello", true), bos), 1) << fixture;
    EXPECT_EQ(CountOf(Tokens(*tokenizer, absl::StrCat(bos, "hello"), false), bos), 1) << fixture;
    EXPECT_EQ(CountOf(Tokens(*tokenizer, "hello", false), bos), 0) << fixture;
  }
  const auto qwen = LoadFixture("qwen3");
  EXPECT_EQ(Tokens(*qwen, "hello", true), Tokens(*qwen, "hello", false));
  EXPECT_EQ(qwen->bos_id(), std::nullopt);
  EXPECT_THAT(qwen->eos_ids(), ElementsAre(*qwen->TokenId("<|im_end|>")));
}

// --- Spaces ----------------------------------------------------------------------

TEST(TokenizerJsonTest, MarkerInFrontOfTheFirstWordOnlyOrOfEach) {
  Json json = PieceJson();
  json["pre_tokenizer"] = kMetaspaceFirst;
  EXPECT_THAT(Tokens(*Make(json), "a<s>a"), ElementsAre("▁a", "<s>", "a"));
  EXPECT_THAT(Tokens(*Make(json), "<s>a"), ElementsAre("<s>", "a"));
  EXPECT_THAT(Tokens(*Make(json), " a"), ElementsAre("▁a"));
  json["pre_tokenizer"]["prepend_scheme"] = "always";
  EXPECT_THAT(Tokens(*Make(json), "<s>a"), ElementsAre("<s>", "▁a"));
  json["pre_tokenizer"]["prepend_scheme"] = "never";
  EXPECT_THAT(Tokens(*Make(json), "<s>a"), ElementsAre("<s>", "a"));
  json["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"add_prefix_space", false}};
  EXPECT_THAT(Tokens(*Make(json), "a"), ElementsAre("a"));
}

TEST(TokenizerJsonTest, DecodingTheIdsOfATextGivesTheText) {
  const std::vector<std::string> texts = {
      "a",           "ab abc", "  two  spaces ", "\n",    "é好😀", "tab\tnewline\n\n\n",
      " a",          "a ",     "1234567 x",      "don't", "",     "C++ -> {x}:\n\treturn 0;",
      "\u2029\ua3e4"};
  for (const char* fixture :
       {"deepseek_v3", "qwen3", "gpt2", "smollm", "llama3", "qwen2", "llama2", "mistral"}) {
    const auto tokenizer = LoadFixture(fixture);
    for (const std::string& text : texts) {
      // Metaspace takes a leading space for the one that it would add.
      if (std::string(fixture) == "mistral" && absl::StartsWith(text, " ")) continue;
      EXPECT_EQ(tokenizer->Decode(*tokenizer->Encode(text, true), true), text) << fixture;
    }
  }
}

// --- Split rules -----------------------------------------------------------------

TEST(TokenizerJsonTest, FamiliesSplitTheSameTextDifferently) {
  const auto tokens = [](const char* fixture, absl::string_view text) {
    const auto tokenizer = LoadFixture(fixture);
    const Ids ids = *tokenizer->Encode(text, false);
    std::vector<std::string> texts;
    for (const int32_t id : ids) {
      texts.push_back(tokenizer->TokenBytes(id));
    }
    return texts;
  };
  EXPECT_THAT(tokens("qwen3", "2024"), ElementsAre("2", "0", "2", "4"));
  EXPECT_THAT(tokens("deepseek_v3", "2024"), ElementsAre("202", "4"));
  EXPECT_THAT(tokens("smollm", "2024"), ElementsAre("2", "0", "2", "4"));
  EXPECT_THAT(tokens("gpt2", "2024"), ElementsAre("2024"));
  EXPECT_THAT(tokens("qwen3", "(x):\n"), ElementsAre("(x", "):\n"));
  EXPECT_THAT(tokens("qwen3", "DON'T"), ElementsAre("DON", "'T"));
  EXPECT_THAT(tokens("qwen3", "a->b"), ElementsAre("a", "->", "b"));
}

TEST(TokenizerJsonTest, WordsBesideAddedTokensAreOnTheirOwn) {
  Json json = PieceJson();
  const auto add = [&](Json flags) {
    flags.update({{"id", 300}, {"content", "<im_start>"}, {"special", false}});
    json["added_tokens"][3] = flags;
    return Make(json);
  };
  EXPECT_THAT(Tokens(*add({{"normalized", false}}), "<im_start>abc"),
              ElementsAre("<im_start>", "abc"));
  EXPECT_THAT(Tokens(*add(Json::object()), "ab<im_start>abc"),
              ElementsAre("ab", "<im_start>", "abc"));
  EXPECT_THAT(Tokens(*add({{"lstrip", true}}), "ab  <im_start> abc"),
              ElementsAre("ab", "<im_start>", "<0x20>", "abc"));
  EXPECT_THAT(Tokens(*add({{"rstrip", true}}), "ab <im_start> \n abc"),
              ElementsAre("ab", "<0x20>", "<im_start>", "abc"));
  const auto single = add({{"single_word", true}});
  EXPECT_EQ(CountOf(Tokens(*single, "a<im_start>"), "<im_start>"), 0);
  EXPECT_EQ(CountOf(Tokens(*single, "(<im_start>)"), "<im_start>"), 1);
}

TEST(TokenizerJsonTest, IdsWithoutATokenDecodeToNothing) {
  Json json = PieceJson();
  json["added_tokens"][3] = {{"id", 400}, {"content", "<late>"}, {"special", false}};
  const auto tokenizer = Make(json);
  EXPECT_EQ(tokenizer->vocab_size(), 401);
  EXPECT_EQ(tokenizer->Decode(Ids{*tokenizer->TokenId("a"), 350, 400, 401, 32255}, true),
            "a<late>");
  EXPECT_EQ(tokenizer->TokenId("missing"), std::nullopt);
}

TEST(TokenizerJsonTest, AddedTokensAreSpelledOutEvenWhereLettersAreBytes) {
  // Tokenizers decodes the é of such a token as the letter for the byte E9.
  const auto tokenizer = LoadFixture("added_flags");
  const std::optional<int32_t> id = tokenizer->TokenId("e\u0301tude");
  ASSERT_TRUE(id.has_value());
  EXPECT_EQ(tokenizer->Decode(Ids{*id}, false), "\u00e9tude");
}

TEST(TokenizerJsonTest, HalfCharactersAmongBytesDoNotSpoilTheirNeighbours) {
  // Tokenizers would replace the whole run of bytes.
  const auto tokenizer = Make(PieceJson());
  const auto byte = [&](const char* text) { return *tokenizer->TokenId(text); };
  EXPECT_EQ(
      tokenizer->Decode(Ids{byte("<0xC3>"), byte("<0xA9>"), byte("<0xE4>"), byte("<0xBD>")}, true),
      "é\uFFFD\uFFFD");
}

TEST(TokenizerJsonTest, LongWordsTakeNoQuadraticTime) {
  const auto tokenizer = Make(PieceJson());
  const std::string text(1 << 18, 'a');
  EXPECT_EQ(tokenizer->Encode(text, false)->size(), text.size());
  std::string merging;
  for (int i = 0; i < 1 << 16; ++i) merging += "abc";
  EXPECT_EQ(tokenizer->Encode(merging, false)->size(), merging.size() / 3);
  EXPECT_EQ(LoadFixture("gpt2")->Encode(std::string(1 << 18, ' '), false)->empty(), false);
}

TEST(TokenizerJsonTest, LongRunsOfMarksTakeNoQuadraticTime) {
  std::string marks = "e";
  for (int i = 0; i < 1 << 17; ++i) marks += "\u0301\u0323";  // Each pair is out of order.
  const auto tokenizer = LoadFixture("qwen2");
  EXPECT_EQ(tokenizer->Decode(*tokenizer->Encode(marks, false), false).substr(0, 5), "ẹ\u0323");
}

TEST(TokenizerJsonTest, ReplacementsOfReplacementsEndSomewhere) {
  Json json = PieceJson();
  for (int i = 0; i < 64; ++i) {
    json["normalizer"]["type"] = "Sequence";
    json["normalizer"]["normalizers"][i] = {
        {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  }
  EXPECT_THAT(std::string(Make(json)->Encode("a", false).status().message()),
              HasSubstr("more than 4112 bytes of a text"));
}

TEST(TokenizerJsonTest, ThreadsShareOneTokenizer) {
  const auto tokenizer = LoadFixture("qwen2");
  const std::string text = "Several threads, one tokenizer: don't 2024 好😀\n\n";
  const Ids expected = *tokenizer->Encode(text, true);
  std::vector<std::thread> threads;
  std::vector<Ids> results(4);
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) results[i] = *tokenizer->Encode(text, true);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Ids& ids : results) EXPECT_EQ(ids, expected);
}

// --- Files that are refused ------------------------------------------------------

struct Refusal {
  const char* pointer;  // What is replaced.
  Json value;
  absl::StatusCode code;
  const char* message;
};

TEST(TokenizerJsonTest, RefusesWhatItDoesNotKnowOrCannotBe) {
  constexpr auto kUnknown = absl::StatusCode::kUnimplemented;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto split = [](Json pattern, const char* behavior) {
    return Json{{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", false}};
  };
  const Json byte_level = {{"type", "ByteLevel"}};
  const std::vector<Refusal> refusals = {
      {"/model", nullptr, kInvalid, "tokenizer.json: \"model\" is missing"},
      {"/model/type", "Unigram", kUnknown, "model.type: \"Unigram\" is not supported"},
      {"/model/type", 3, kInvalid, "model.type: must be a string"},
      {"/model/dropout", 0.1, kUnknown, "dropout"},
      {"/model/end_of_word_suffix", "</w>", kUnknown, "end_of_word_suffix"},
      {"/model/unk_token", "<none>", kInvalid, "\"<none>\" is not in the vocabulary"},
      {"/model/byte_fallback", "yes", kInvalid, "model.byte_fallback: must be true or false"},
      {"/model/vocab", Json::array(), kInvalid, "model.vocab: must be an object"},
      {"/model/vocab/a", 0, kInvalid, "share the id 0"},
      {"/model/vocab/a", -1, kInvalid, "token \"a\" has the id -1"},
      {"/model/vocab/a", 1 << 30, kInvalid, "token \"a\" has the id"},
      {"/model/vocab/a", 1e30, kInvalid, "model.vocab[\"a\"]: must be an integer of 32 bits"},
      {"/model/vocab/a", 5000000000, kInvalid, "must be an integer of 32 bits"},
      {"/model/merges/0", "ab", kInvalid, "model.merges[0]: must be two tokens"},
      {"/model/merges/0", "a b c", kInvalid, "must be two tokens"},
      {"/model/merges/0", {"a"}, kInvalid, "must be two tokens"},
      {"/model/merges/0", {"a", 7}, kInvalid, "model.merges[0][1]: must be a string"},
      {"/model/merges/0", "a z", kInvalid, "needs the token \"z\""},
      {"/model/merges/0", "b a", kInvalid, "needs the token \"ba\""},
      {"/normalizer", {{"type", "NFKC"}}, kUnknown, "normalizer: type \"NFKC\" is not supported"},
      {"/normalizer", {{"type", "Sequence"}}, kInvalid, "normalizer: \"normalizers\" is missing"},
      {"/normalizer", "NFC", kInvalid, "normalizer: must be an object"},
      {"/pre_tokenizer", {{"type", "Whitespace"}}, kUnknown, "type \"Whitespace\""},
      {"/pre_tokenizer", split({{"Regex", "\\w"}}, "Isolated"), kUnknown, "pattern: regular"},
      {"/pre_tokenizer", split({{"Regex", "("}}, "Isolated"), kInvalid, "missing closing"},
      {"/pre_tokenizer", split({{"String", ""}}, "Isolated"), kInvalid, "empty"},
      {"/pre_tokenizer", split(Json::object(), "Isolated"), kInvalid, "must be either"},
      {"/pre_tokenizer", split({{"String", "x"}}, "Odd"), kUnknown, "behavior \"Odd\""},
      {"/pre_tokenizer", byte_level, kUnknown, "ByteLevel must be both"},
      {"/decoder", byte_level, kUnknown, "ByteLevel must be both"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", {byte_level, {{"type", "Digits"}}}}},
       kUnknown,
       "pre_tokenizer.pretokenizers[1]: a step after ByteLevel"},
      {"/pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "_"}}, kUnknown, "\"_\""},
      {"/pre_tokenizer",
       {{"type", "Metaspace"},
        {"replacement", "▁"},
        {"add_prefix_space", false},
        {"prepend_scheme", "always"}},
       kInvalid,
       "contradict"},
      {"/decoder", nullptr, kInvalid, "\"decoder\" is missing"},
      {"/decoder", {{"type", "WordPiece"}}, kUnknown, "type \"WordPiece\""},
      {"/decoder", {{"type", "Sequence"}, {"decoders", Json::array()}}, kUnknown, "\"Sequence\""},
      {"/decoder/decoders/0", {{"type", "Fuse"}}, kUnknown, "type \"Fuse\""},
      {"/decoder/decoders/1", {{"type", "Replace"}}, kUnknown, "type \"Replace\""},
      {"/decoder/decoders/3/start", 2, kUnknown, "only one space"},
      {"/post_processor", {{"type", "BertProcessing"}}, kUnknown, "\"BertProcessing\""},
      {"/post_processor", Template(Json::array({kBos})), kUnknown, "without the text"},
      {"/post_processor", Template({kText, kText}), kUnknown, "must appear once"},
      {"/post_processor", Template({kText, {{"SpecialToken", {{"id", "<x>"}}}}}), kInvalid,
       "special_tokens: \"<x>\" is missing"},
      {"/added_tokens/0/id", 1, kInvalid, "share the id 1"},
      {"/added_tokens/0/id", 77777777, kInvalid, "added_tokens[0]: token \"<unk>\" has the id"},
      {"/added_tokens/0/content", "", kInvalid, "is empty"},
      {"/added_tokens/0/lstrip", 1, kInvalid, "added_tokens[0].lstrip: must be true or false"},
      {"/added_tokens", 3, kInvalid, "added_tokens: must be an array"},
  };
  for (const Refusal& refusal : refusals) {
    Json json = PieceJson();
    json[Json::json_pointer(refusal.pointer)] = refusal.value;
    const absl::Status status = ParseTokenizerJson(json.dump(), "").status();
    EXPECT_EQ(status.code(), refusal.code) << refusal.pointer << " " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(refusal.message));
  }
}

TEST(TokenizerJsonTest, RefusesBrokenDocuments) {
  const std::string whole = PieceJson().dump();
  for (const std::string& text : std::vector<std::string>{
           "", "{", "[]", "null", "\"text\"", whole.substr(0, whole.size() / 2), whole + "x",
           "{\"model\": \"\xFF\"}", std::string(1 << 16, '[')}) {
    const absl::Status status = ParseTokenizerJson(text, "").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 40);
    EXPECT_THAT(std::string(status.message()), HasSubstr("tokenizer.json: "));
  }
}

TEST(TokenizerJsonTest, RefusesConfigsThatContradict) {
  const auto message = [](const Json& config) {
    return std::string(ParseTokenizerJson(PieceJson().dump(), config.dump()).status().message());
  };
  EXPECT_THAT(message({{"bos_token", "<none>"}}), HasSubstr("bos_token \"<none>\" is not in the"));
  EXPECT_THAT(message({{"add_bos_token", true}}), HasSubstr("there is no bos_token"));
  EXPECT_THAT(message({{"add_eos_token", 1}}), HasSubstr("add_eos_token: must be true or false"));
  EXPECT_THAT(message({{"eos_token", {"</s>"}}}), HasSubstr("eos_token: must be a string"));
}

TEST(TokenizerJsonTest, SpecialIdsMustBeTokens) {
  Json json = PieceJson();
  json["post_processor"] = Template({kBos, kText});
  json["post_processor"]["special_tokens"]["<s>"]["ids"] = {9999};
  EXPECT_THAT(ParseTokenizerJson(json.dump(), "").status().message(), HasSubstr("the id 9999"));
}

TEST(TokenizerJsonTest, MissingFilesAreNamed) {
  EXPECT_THAT(LoadTokenizer("/nonexistent/model").status().message(),
              HasSubstr("/nonexistent/model: neither tokenizer.json nor tokenizer.model"));
}

}  // namespace
}  // namespace heddle
