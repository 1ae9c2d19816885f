// The tokenizer of GGUF metadata gives the ids of the tokenizer.json it came from.
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/text/tokenizer.h"
#include "tests/runtime/text/tokenizer_fixture.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

// tokenizer.ggml.token_type
constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kByte = 6;

// As the converters write a fixture's vocabulary.
GgufVocabulary ToGguf(absl::string_view fixture, absl::string_view pre) {
  const auto json = nlohmann::json::parse(FixtureFile(fixture, "tokenizer.json.xz"));
  GgufVocabulary gguf;
  gguf.model = pre.empty() ? "llama" : "gpt2";
  gguf.pre = std::string(pre);
  const auto set = [&](size_t id, const std::string& text, int32_t type) {
    if (gguf.tokens.size() <= id) {
      gguf.tokens.resize(id + 1);
      gguf.token_types.resize(id + 1, kNormal);
    }
    gguf.tokens[id] = text;
    gguf.token_types[id] = type;
  };
  for (const auto& [text, id] : json["model"]["vocab"].items()) {
    const bool is_byte = pre.empty() && ByteOfToken(text).has_value();
    set(id, text, is_byte ? kByte : kNormal);
  }
  for (const auto& token : json["added_tokens"]) {
    const int32_t type = token["content"] == "<unk>" ? kUnknown
                         : token["special"]          ? kControl
                                                     : kUserDefined;
    set(token["id"], token["content"], type);
  }
  if (pre.empty()) {
    // Sentencepiece's ids fall by score.
    for (size_t id = 0; id < gguf.tokens.size(); ++id) {
      gguf.scores.push_back(gguf.token_types[id] == kNormal ? -static_cast<float>(id) : 0);
    }
    gguf.bos_id = 1;
    gguf.eos_id = 2;
    gguf.unknown_id = 0;
  }
  for (const auto& merge : json["model"]["merges"]) {
    gguf.merges.push_back(merge.is_string() ? merge.get<std::string>()
                                            : absl::StrCat(merge[0].get<std::string>(), " ",
                                                           merge[1].get<std::string>()));
  }
  return gguf;
}

struct Family {
  std::string fixture;
  std::string pre;  // Empty for sentencepiece style.
};

class GgufTokenizerTest : public testing::TestWithParam<Family> {};

TEST_P(GgufTokenizerTest, IdsAreThoseOfTokenizerJson) {
  const auto tokenizer = MakeGgufTokenizer(ToGguf(GetParam().fixture, GetParam().pre));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const nlohmann::json expected = LoadExpectations(GetParam().fixture);
  for (const auto& encoding : expected["encodings"]) {
    const std::string text = absl::HexStringToBytes(encoding["hex"].get<std::string>());
    EXPECT_EQ(*(*tokenizer)->Encode(text, false), encoding["ids"].get<Ids>())
        << absl::CHexEscape(text);
  }
  for (const auto& decoding : expected["decodings"]) {
    const Ids ids = decoding["ids"].get<Ids>();
    EXPECT_EQ((*tokenizer)->Decode(ids, true), decoding["text_without_special"].get<std::string>());
    EXPECT_EQ((*tokenizer)->Decode(ids, false), decoding["text"].get<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GgufTokenizerTest,
                         testing::Values(Family{"gpt2", "gpt-2"}, Family{"smollm", "smollm"},
                                         Family{"llama3", "llama-bpe"}, Family{"qwen2", "qwen2"},
                                         Family{"qwen3", "qwen2"},
                                         Family{"deepseek_v3", "deepseek-v3"},
                                         Family{"llama2", ""}),
                         [](const auto& test) { return test.param.fixture; });

GgufVocabulary Tiny() {
  GgufVocabulary gguf;
  gguf.model = "llama";
  gguf.tokens = {"<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"};
  gguf.scores = {0, 0, 0, -4, -5, -6, -1, -2};
  gguf.token_types = {kUnknown, kControl, kControl, kNormal, kNormal, kNormal, kNormal, kNormal};
  gguf.bos_id = 1;
  gguf.eos_id = 2;
  gguf.unknown_id = 0;
  return gguf;
}

Ids EncodeWith(const GgufVocabulary& gguf, absl::string_view text) {
  const auto tokenizer = MakeGgufTokenizer(gguf);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *(*tokenizer)->Encode(text, /*add_special_tokens=*/true);
}

TEST(GgufTokenizerRulesTest, BosEosAndPrefixAsTheFileSays) {
  GgufVocabulary gguf = Tiny();
  EXPECT_THAT(EncodeWith(gguf, "ab"), ElementsAre(1, 7));
  EXPECT_THAT(EncodeWith(gguf, "abz"), ElementsAre(1, 7, 0));
  gguf.add_bos = false;
  gguf.add_eos = true;
  gguf.add_space_prefix = false;
  EXPECT_THAT(EncodeWith(gguf, "ab"), ElementsAre(6, 2));
  gguf.eot_id = 1;
  EXPECT_THAT((*MakeGgufTokenizer(gguf))->eos_ids(), ElementsAre(2, 1));
}

TEST(GgufTokenizerRulesTest, LlamaThreeAddsBosUnlessToldOtherwise) {
  GgufVocabulary gguf = ToGguf("llama3", "llama-bpe");
  gguf.bos_id = 1756;
  EXPECT_EQ(EncodeWith(gguf, "a").front(), 1756);
  gguf.add_bos = false;
  EXPECT_NE(EncodeWith(gguf, "a").front(), 1756);
  gguf.pre = "gpt-2";
  gguf.add_bos.reset();
  EXPECT_NE(EncodeWith(gguf, "a").front(), 1756);
}

TEST(GgufTokenizerRulesTest, RefusesWhatItDoesNotKnowOrCannotBe) {
  const auto message = [](auto change) {
    GgufVocabulary gguf = Tiny();
    change(&gguf);
    return std::string(MakeGgufTokenizer(gguf).status().message());
  };
  using G = GgufVocabulary*;
  EXPECT_THAT(message([](G g) { g->model = "bert"; }),
              HasSubstr("model \"bert\" is not supported"));
  EXPECT_THAT(message([](G g) { g->model = "gpt2"; }), HasSubstr("tokenizer.ggml.pre \"\""));
  EXPECT_THAT(message([](G g) { g->model = "gpt2", g->pre = "falcon"; }),
              HasSubstr("\"falcon\" is not supported; known are gpt-2, smollm, llama-bpe"));
  EXPECT_THAT(message([](G g) { g->tokens.clear(); }), HasSubstr("tokens is empty"));
  EXPECT_THAT(message([](G g) { g->scores.pop_back(); }), HasSubstr("scores has 7 entries"));
  EXPECT_THAT(message([](G g) { g->scores.clear(); }), HasSubstr("scores is missing"));
  EXPECT_THAT(message([](G g) { g->scores[4] = std::nanf(""); }), HasSubstr("NaN"));
  EXPECT_THAT(message([](G g) { g->token_types.push_back(1); }), HasSubstr("has 9 entries"));
  EXPECT_THAT(message([](G g) { g->tokens[4] = "\xFF"; }), HasSubstr("tokens[4] is not UTF-8"));
  EXPECT_THAT(message([](G g) { g->tokens[4] = std::string(5000, 'a'); }), HasSubstr("4096"));
  EXPECT_THAT(message([](G g) { g->tokens[4] = "b"; }), HasSubstr("\"b\" has two ids, 4 and 5"));
  EXPECT_THAT(message([](G g) { g->bos_id = 8; }), HasSubstr("bos_token_id is 8"));
  EXPECT_THAT(message([](G g) { g->eos_id = 4000000000; }),
              HasSubstr("eos_token_id is 4000000000"));
  EXPECT_THAT(message([](G g) { g->tokens[1].clear(); }), HasSubstr("which is no token's"));
  EXPECT_THAT(message([](G g) {
                g->model = "gpt2", g->pre = "gpt-2";
                g->merges = {"a b", "a c"};
              }),
              HasSubstr("tokenizer.ggml.merges[1]: the merge of \"a\" and \"c\""));
}

}  // namespace
}  // namespace heddle
