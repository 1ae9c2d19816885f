// Text in and text out: an engine whose model has a tokenizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"
#include "tests/runtime/checkpoint/files.h"
#include "tests/runtime/text/tokenizer_fixture.h"
#include "tests/support/engine_world.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Lt;
using ::testing::SizeIs;

constexpr int kVocabSize = 2304;  // of the model; the tokenizers have some 1,760 ids

// A model of random weights with the tokenizer of a fixture.
class ModelWithText {
 public:
  explicit ModelWithText(const std::string& fixture) : tokenizer_(LoadFixture(fixture)) {
    nlohmann::json config =
        nlohmann::json::parse(ReadFile(LoadGoldenModel("gqa-a")->path + "/config.json"));
    config["vocab_size"] = kVocabSize;
    directory_.Write("config.json", config.dump());
    directory_.Write("tokenizer.json", FixtureFile(fixture, "tokenizer.json.xz"));
    directory_.Write("tokenizer_config.json", FixtureFile(fixture, "tokenizer_config.json"));
  }

  EngineConfig config() const {
    EngineConfig config = TestEngineConfig(directory_.path());
    config.load_format = LoadFormat::kDummy;
    config.max_model_len = 128;
    return config;
  }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  TemporaryDirectory directory_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
};

Request TextRequest(const std::string& prompt, int64_t max_tokens) {
  Request request = GreedyRequest({}, max_tokens);
  request.prompt = prompt;
  return request;
}

std::vector<CollectedSequence> Generate(const ModelWithText& model, int num_ranks,
                                        const std::vector<Request>& requests) {
  const absl::StatusOr<EngineRun> run = RunRequests(model.config(), num_ranks, requests);
  EXPECT_TRUE(run.ok()) << run.status();
  std::vector<CollectedSequence> sequences(requests.size());
  for (size_t i = 0; run.ok() && i < requests.size(); ++i) sequences[i] = run->results[i].front();
  return sequences;
}

TEST(EngineText, AnEmptyTextIsAPromptWithoutTokens) {
  const ModelWithText llama("llama2");  // has a BOS token
  const auto sequences =
      Generate(llama, 2, {TextRequest("", 6), GreedyRequest({}, 6), GreedyRequest({1}, 6)});
  for (const CollectedSequence& sequence : sequences) {
    EXPECT_THAT(sequence.prompt_token_ids, ElementsAre(1));
    EXPECT_THAT(sequence.token_ids, SizeIs(6));
    EXPECT_EQ(sequence.token_ids, sequences[0].token_ids);
  }

  const ModelWithText qwen("qwen2");  // has none, whatever its config.json says
  const absl::Status status = WithEngine(
      qwen.config(), 2, [](auto) {},
      [](Engine& engine) {
        for (Request request : {TextRequest("", 6), GreedyRequest({}, 6)}) {
          request.id = "x";
          EXPECT_THAT(engine.Submit(request).message(), HasSubstr("no BOS token"));
        }
        Request next = TextRequest("next", 6);
        next.id = "x";
        RETURN_IF_ERROR(engine.Submit(next));
        return engine.Drain();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(EngineText, IdsThatAreNoTokensAreNeverSampled) {
  const ModelWithText model("llama2");
  const int32_t num_tokens = model.tokenizer().vocab_size();
  ASSERT_LT(num_tokens, kVocabSize * 4 / 5);
  Request request = TextRequest("Once upon a time", 100);
  request.params.temperature = 20.0;  // as good as uniform
  request.params.seed = 5;
  std::vector<std::string> texts;
  for (const int num_ranks : {1, 3}) {
    const CollectedSequence sequence = Generate(model, num_ranks, {request}).front();
    EXPECT_THAT(sequence.token_ids, SizeIs(100));
    EXPECT_THAT(sequence.token_ids, Each(Lt(num_tokens)));
    EXPECT_EQ(sequence.text, model.tokenizer().Decode(sequence.token_ids, true));
    texts.push_back(sequence.text);
  }
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(EngineText, StopStringsCutTheTextWhereverTheyBegin) {
  const ModelWithText model("llama2");
  Request request = TextRequest("Once upon a time", 24);
  request.params.temperature = 1.0;
  request.params.seed = 11;
  const std::string whole = Generate(model, 2, {request}).front().text;
  const auto starts_character = [&](size_t at) { return (whole[at] & 0xC0) != 0x80; };
  int num_stops = 0;
  for (size_t begin = 0; begin + 5 < whole.size(); begin += 7) {
    if (!starts_character(begin) || !starts_character(begin + 5)) continue;
    ++num_stops;
    Request stopped = request;
    stopped.params.stop = {"not in the text", whole.substr(begin, 5)};
    const CollectedSequence sequence = Generate(model, 2, {stopped}).front();
    EXPECT_EQ(sequence.text, whole.substr(0, whole.find(stopped.params.stop[1])));
    EXPECT_EQ(sequence.finish_reason, FinishReason::kStop);
  }
  EXPECT_GT(num_stops, 4);
}

}  // namespace
}  // namespace heddle
