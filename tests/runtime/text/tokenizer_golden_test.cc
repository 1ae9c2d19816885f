// Ids and texts equal to Hugging Face's tokenizers and to sentencepiece.
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/text/stream_decoder.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"
#include "tests/runtime/text/tokenizer_fixture.h"

namespace heddle {
namespace {

using Ids = std::vector<int32_t>;

class TokenizerGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  const std::shared_ptr<const Tokenizer> tokenizer_ = LoadFixture(GetParam());
  const nlohmann::json expected_ = LoadExpectations(GetParam());
};

TEST_P(TokenizerGoldenTest, Encodes) {
  ASSERT_GE(expected_["encodings"].size(), 200u);
  for (const auto& encoding : expected_["encodings"]) {
    const std::string text = absl::HexStringToBytes(encoding["hex"].get<std::string>());
    const absl::StatusOr<Ids> ids = tokenizer_->Encode(text, /*add_special_tokens=*/false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, encoding["ids"].get<Ids>()) << absl::CHexEscape(text);
  }
}

TEST_P(TokenizerGoldenTest, Decodes) {
  ASSERT_GE(expected_["decodings"].size(), 100u);
  for (const auto& decoding : expected_["decodings"]) {
    const Ids ids = decoding["ids"].get<Ids>();
    const std::string clean = decoding["text_without_special"];
    EXPECT_EQ(tokenizer_->Decode(ids, true), clean) << testing::PrintToString(ids);
    if (decoding.contains("text")) {  // Sentencepiece never shows special tokens.
      EXPECT_EQ(tokenizer_->Decode(ids, false), decoding["text"].get<std::string>())
          << testing::PrintToString(ids);
    }

    StreamDecoder decoder(tokenizer_.get(), /*skip_special_tokens=*/true);
    std::string streamed;
    for (const int32_t id : ids) {
      const std::string chunk = decoder.Push(id);
      EXPECT_EQ(ToValidUtf8(chunk), chunk) << absl::CHexEscape(chunk);
      streamed += chunk;
    }
    EXPECT_EQ(streamed + decoder.Flush(), clean);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, TokenizerGoldenTest,
                         testing::Values("deepseek_v3", "qwen3", "gpt2", "smollm", "llama3",
                                         "qwen2", "llama2", "mistral", "sp_llama", "sp_small",
                                         "sp_unigram"),
                         [](const auto& test) { return test.param; });

INSTANTIATE_TEST_SUITE_P(Rules, TokenizerGoldenTest,
                         testing::Values("added_flags", "added_prepended", "metaspace_always_split",
                                         "metaspace_first_split", "metaspace_never_whole",
                                         "unknown_fused", "unknown_apart", "prefix_space",
                                         "split_removed", "split_previous", "split_next",
                                         "split_contiguous", "split_inverted", "split_lines",
                                         "deepseek_v2"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace heddle
