// Requests from submission to their last output: refusals, aborts, lengths, forks, logprobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "tests/support/engine_world.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::vector<int32_t> RandomPrompt(int64_t length, uint32_t seed, int32_t vocab_size = 200) {
  std::mt19937 random(seed);
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < length; ++i) {
    prompt.push_back(std::uniform_int_distribution<int32_t>(3, vocab_size - 1)(random));
  }
  return prompt;
}

EngineConfig Config(const std::string& model = "gqa-a") {
  const absl::StatusOr<GoldenModel> golden = LoadGoldenModel(model);
  EngineConfig config = TestEngineConfig(golden->path);
  config.max_model_len = golden->max_model_len;
  config.block_size = 4;
  return config;
}

std::vector<int32_t> Alone(const EngineConfig& config, const Request& request) {
  const absl::StatusOr<EngineRun> run = RunRequests(config, 1, {request});
  EXPECT_TRUE(run.ok()) << run.status();
  return run.ok() ? run->results[0][0].token_ids : std::vector<int32_t>();
}

// Keeps every output and lets a test act in the middle of a run.
class Recorder {
 public:
  explicit Recorder(std::function<void(const RequestOutput&)> act = nullptr)
      : act_(std::move(act)) {}

  OutputCallback callback() {
    return [this](RequestOutput output) {
      if (act_) act_(output);
      outputs[output.id].push_back(std::move(output));
    };
  }
  FinishReason ReasonOf(const std::string& id) const {
    const auto found = outputs.find(id);
    return found == outputs.end() ? FinishReason::kUnfinished : found->second.back().finish_reason;
  }
  std::vector<int32_t> TokensOf(const std::string& id) const {
    std::vector<int32_t> tokens;
    const auto found = outputs.find(id);
    if (found == outputs.end()) return tokens;
    for (const RequestOutput& output : found->second) {
      tokens.insert(tokens.end(), output.token_ids.begin(), output.token_ids.end());
    }
    return tokens;
  }
  int64_t NumFinished(const std::string& id) const {
    const auto found = outputs.find(id);
    if (found == outputs.end()) return 0;
    return std::count_if(found->second.begin(), found->second.end(), [](const auto& output) {
      return output.finish_reason != FinishReason::kUnfinished;
    });
  }

  // Written on the engine's thread; read after Drain.
  std::map<std::string, std::vector<RequestOutput>> outputs;

 private:
  std::function<void(const RequestOutput&)> act_;
};

Request Named(std::string id, Request request) {
  request.id = std::move(id);
  return request;
}

TEST(EngineLifecycle, RefusesAtTheDoorWhatCannotRun) {
  EngineConfig config = Config();
  config.num_kv_pages = 8;  // 32 tokens
  Recorder recorder;
  const absl::Status status = WithEngine(config, 1, recorder.callback(), [](Engine& engine) {
    const auto refusal = [&](Request request) {
      return engine.Submit(Named("x", std::move(request)));
    };
    EXPECT_THAT(refusal(GreedyRequest({1, 259}, 4)).message(),
                HasSubstr("token id 259 at position 1 is outside the vocabulary of 259"));
    EXPECT_THAT(refusal(GreedyRequest({-1}, 4)).message(), HasSubstr("token id -1"));
    EXPECT_THAT(refusal(GreedyRequest(RandomPrompt(128, 1), 4)).message(),
                HasSubstr("128 tokens; the context of 128 leaves no room"));
    const absl::Status no_pages = refusal(GreedyRequest(RandomPrompt(33, 1), 4));
    EXPECT_EQ(no_pages.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(no_pages.message(), HasSubstr("34 tokens; the cache has 32"));
    Request text;
    text.prompt = "words";
    EXPECT_THAT(refusal(text).message(), HasSubstr("no tokenizer"));
    Request bad = GreedyRequest({5}, 4);
    bad.params.top_p = 1.5;
    EXPECT_THAT(refusal(bad).message(), HasSubstr("top_p"));
    bad = GreedyRequest({5}, 4);
    bad.params.logprobs = 260;
    EXPECT_THAT(refusal(bad).message(), HasSubstr("logprobs"));
    EXPECT_THAT(engine.Submit(Named("", GreedyRequest({5}, 4))).message(), HasSubstr("id"));
    // After all that the next one runs.
    RETURN_IF_ERROR(refusal(GreedyRequest({5, 6, 7, 8}, 4)));
    return engine.Drain();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(recorder.TokensOf("x"), SizeIs(4));
  EXPECT_EQ(recorder.NumFinished("x"), 1);
}

TEST(EngineLifecycle, AnEmptyPromptStartsFromBosIfThereIsOne) {
  const absl::StatusOr<EngineRun> run = RunRequests(Config(), 1, {GreedyRequest({}, 4)});
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_THAT(run->results[0][0].prompt_token_ids, ElementsAre(1));
  EXPECT_THAT(run->results[0][0].token_ids, SizeIs(4));

  EngineConfig config = Config();
  std::ifstream file(config.model + "/config.json");
  std::string json((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  json.replace(json.find("\"bos_token_id\""), sizeof("\"bos_token_id\"") - 1, "\"no_such_key\"");
  config.model = ::testing::TempDir() + "heddle_no_bos";
  std::filesystem::create_directories(config.model);
  std::ofstream(config.model + "/config.json") << json;
  config.load_format = LoadFormat::kDummy;
  EXPECT_THAT(RunRequests(config, 1, {GreedyRequest({}, 4)}).status().message(),
              HasSubstr("no BOS token"));
}

TEST(EngineLifecycle, AnIdIsTakenUntilItsRequestHasEnded) {
  Recorder recorder;
  const absl::Status status = WithEngine(Config(), 2, recorder.callback(), [](Engine& engine) {
    RETURN_IF_ERROR(engine.Submit(Named("x", GreedyRequest({5, 6}, 20))));
    EXPECT_EQ(engine.Submit(Named("x", GreedyRequest({7}, 2))).code(),
              absl::StatusCode::kAlreadyExists);
    RETURN_IF_ERROR(engine.Drain());
    RETURN_IF_ERROR(engine.Submit(Named("x", GreedyRequest({7}, 2))));
    RETURN_IF_ERROR(engine.Drain());
    return engine.Drain();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(recorder.NumFinished("x"), 2);
  EXPECT_THAT(recorder.TokensOf("x"), SizeIs(22));
}

// An abort comes at every point of a request's life: of several waiting, in the middle of a chunked
// prompt, while it decodes, after a preemption.
TEST(EngineLifecycle, AbortsAtEveryStepLeaveNothingBehind) {
  for (int64_t after = 0; after < 30; ++after) {
    EngineConfig config = Config();
    config.num_kv_pages = 12;
    config.prefill_chunk = 4;
    Engine* running = nullptr;
    int64_t num_outputs = 0;
    Recorder recorder([&](const RequestOutput&) {
      if (running != nullptr && num_outputs++ == after) running->Abort("victim");
    });
    const absl::Status status =
        WithEngine(config, 2, recorder.callback(), [&](Engine& engine) -> absl::Status {
          RETURN_IF_ERROR(engine.Submit(Named("a", GreedyRequest(RandomPrompt(9, 1), 16))));
          running = &engine;
          RETURN_IF_ERROR(engine.Submit(Named("victim", GreedyRequest(RandomPrompt(20, 2), 16))));
          RETURN_IF_ERROR(engine.Submit(Named("b", GreedyRequest(RandomPrompt(5, 3), 16))));
          if (after == 0) engine.Abort("victim");
          engine.Abort("nobody");
          RETURN_IF_ERROR(engine.Drain());
          EXPECT_EQ(engine.stats().num_running + engine.stats().num_waiting, 0);
          // The whole pool can be had again.
          RETURN_IF_ERROR(engine.Submit(Named("all", GreedyRequest(RandomPrompt(40, 4), 8))));
          return engine.Drain();
        });
    ASSERT_TRUE(status.ok()) << status;
    for (const char* id : {"a", "b", "victim", "all"}) EXPECT_EQ(recorder.NumFinished(id), 1) << id;
    EXPECT_EQ(recorder.ReasonOf("a"), FinishReason::kLength);
    EXPECT_THAT(recorder.TokensOf("a"), SizeIs(16));
    EXPECT_THAT(recorder.TokensOf("all"), SizeIs(8));
  }
}

TEST(EngineLifecycle, WhatIsInFlightWhenTheEngineGoesIsAborted) {
  Recorder recorder;
  const absl::Status status = WithEngine(Config(), 2, recorder.callback(), [](Engine& engine) {
    for (int i = 0; i < 20; ++i) {
      RETURN_IF_ERROR(
          engine.Submit(Named(absl::StrCat(i), GreedyRequest(RandomPrompt(5, i), 100))));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(recorder.outputs, SizeIs(20));
  for (const auto& [id, outputs] : recorder.outputs) {
    EXPECT_EQ(recorder.NumFinished(id), 1);
    EXPECT_THAT(outputs.back().finish_reason,
                ::testing::AnyOf(FinishReason::kAbort, FinishReason::kLength));
  }
}

TEST(EngineLifecycle, ManyThreadsMaySubmit) {
  Recorder recorder;
  const absl::Status status =
      WithEngine(Config(), 2, recorder.callback(), [](Engine& engine) -> absl::Status {
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; ++t) {
          threads.emplace_back([&engine, t] {
            for (int i = 0; i < 8; ++i) {
              EXPECT_TRUE(
                  engine.Submit(Named(absl::StrCat(t, "-", i), GreedyRequest({5, 6 + i}, 3))).ok());
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
        return engine.Drain();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(recorder.outputs, SizeIs(32));
}

TEST(EngineLifecycle, PromptsAroundPageBoundsAreReusedAndGiveTheSame) {
  EngineConfig config = Config();
  for (const int64_t length : {1, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17}) {
    const Request request = GreedyRequest(RandomPrompt(length, 11), 6);
    EngineConfig without = config;
    without.enable_prefix_caching = false;
    const std::vector<int32_t> expected = Alone(without, request);
    Recorder recorder;
    const absl::Status status =
        WithEngine(config, 2, recorder.callback(), [&](Engine& engine) -> absl::Status {
          for (const char* id : {"first", "second", "third"}) {
            RETURN_IF_ERROR(engine.Submit(Named(id, request)));
            RETURN_IF_ERROR(engine.Drain());
          }
          return absl::OkStatus();
        });
    ASSERT_TRUE(status.ok()) << status;
    for (const char* id : {"first", "second", "third"}) {
      EXPECT_EQ(recorder.TokensOf(id), expected) << id << " of length " << length;
    }
    EXPECT_EQ(recorder.outputs["first"].front().cached_tokens, 0);
    EXPECT_EQ(recorder.outputs["second"].front().cached_tokens, (length - 1) / 4 * 4);
  }
}

TEST(EngineLifecycle, ScoringAPromptComputesItWholeAlsoWhenItIsCached) {
  Request score = GreedyRequest(RandomPrompt(13, 5), 0);
  score.params.prompt_logprobs = true;
  const absl::StatusOr<EngineRun> run =
      RunRequests(Config(), 2, {GreedyRequest(RandomPrompt(13, 5), 4), score, score});
  ASSERT_TRUE(run.ok()) << run.status();
  for (const int i : {1, 2}) {
    const CollectedSequence& scored = run->results[i].front();
    EXPECT_THAT(scored.prompt_logprobs, SizeIs(13));
    EXPECT_EQ(scored.prompt_logprobs, run->results[1].front().prompt_logprobs);
    EXPECT_THAT(scored.token_ids, IsEmpty());
    EXPECT_EQ(scored.finish_reason, FinishReason::kLength);
    EXPECT_EQ(scored.cached_tokens, 0);
  }
}

TEST(EngineLifecycle, LengthsEndWhereTheyMust) {
  EngineConfig config = Config();
  config.max_model_len = 24;
  const auto length_of = [&](std::optional<int64_t> max_tokens, int64_t prompt_length) {
    Request request = GreedyRequest(RandomPrompt(prompt_length, 3), 0);
    request.params.max_tokens = max_tokens;
    const absl::StatusOr<EngineRun> run = RunRequests(config, 1, {request});
    EXPECT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->results[0][0].finish_reason, FinishReason::kLength);
    return run->results[0][0].token_ids.size();
  };
  EXPECT_EQ(length_of(0, 5), 0u);
  EXPECT_EQ(length_of(1, 5), 1u);
  EXPECT_EQ(length_of(std::nullopt, 22), 2u);
  EXPECT_EQ(length_of(100, 20), 4u);
  EXPECT_EQ(length_of(100, 23), 1u);
  config.num_kv_pages = 4;  // 16 tokens: the cache ends before the context does
  EXPECT_EQ(length_of(100, 10), 6u);
}

TEST(EngineLifecycle, TwoPromptsThatFillThePoolTakeTurns) {
  EngineConfig config = Config();
  config.num_kv_pages = 10;
  config.prefill_chunk = 4;
  config.enable_prefix_caching = false;
  const absl::StatusOr<EngineRun> run = RunRequests(
      config, 2, {GreedyRequest(RandomPrompt(24, 1), 8), GreedyRequest(RandomPrompt(24, 2), 8)});
  ASSERT_TRUE(run.ok()) << run.status();
  for (const auto& sequences : run->results) EXPECT_THAT(sequences[0].token_ids, SizeIs(8));
}

TEST(EngineLifecycle, WhatIsQueuedTogetherRunsTogether) {
  EngineConfig config = Config();
  config.max_num_seqs = 16;
  config.num_kv_pages = 256;
  std::vector<Request> requests;
  for (int i = 0; i < 16; ++i) requests.push_back(GreedyRequest({5 + i, 6, 7}, 10));
  const absl::StatusOr<EngineRun> run = RunRequests(config, 1, requests);
  ASSERT_TRUE(run.ok()) << run.status();
  // 16 sequences of 10 tokens: 160 rows alone, a few more steps than 10 when the first ones start
  // before the last are submitted.
  EXPECT_LE(run->stats.num_steps, 10 + 16);
  EXPECT_EQ(run->stats.num_generated_tokens, 160);
}

TEST(EngineLifecycle, SamplesOfOnePromptShareItAndDiffer) {
  for (const int64_t prompt_length : {1, 4, 6, 9}) {
    for (const int num_ranks : {1, 3}) {
      Request request = GreedyRequest(RandomPrompt(prompt_length, 21), 10);
      request.params.temperature = 1.0;
      request.params.seed = 77;
      request.params.n = 4;
      EngineConfig config = Config();
      const absl::StatusOr<EngineRun> forked = RunRequests(config, num_ranks, {request});
      ASSERT_TRUE(forked.ok()) << forked.status();
      ASSERT_THAT(forked->results[0], SizeIs(4));
      config.use_kv_cache = false;  // shares nothing
      const absl::StatusOr<EngineRun> apart = RunRequests(config, 1, {request});
      ASSERT_TRUE(apart.ok()) << apart.status();
      std::set<std::vector<int32_t>> different;
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_THAT(forked->results[0][i].token_ids, SizeIs(10));
        EXPECT_EQ(forked->results[0][i].token_ids, apart->results[0][i].token_ids);
        different.insert(forked->results[0][i].token_ids);
      }
      EXPECT_GT(different.size(), 1u);
    }
  }
}

// They stay on their parent's rank, or start anew on one that has room.
TEST(EngineLifecycle, SamplesOfOnePromptWithDataParallelAttention) {
  Request request = GreedyRequest(RandomPrompt(13, 9, 90), 10);
  request.params.temperature = 1.0;
  request.params.seed = 77;
  request.params.n = 6;
  EngineConfig config = Config("mla-v3");
  config.use_kv_cache = false;
  const absl::StatusOr<EngineRun> apart = RunRequests(config, 1, {request});
  ASSERT_TRUE(apart.ok()) << apart.status();
  config.use_kv_cache = true;
  config.enable_dp_attention = true;
  for (const int64_t num_pages : {8, 64}) {
    config.num_kv_pages = num_pages;
    const absl::StatusOr<EngineRun> run = RunRequests(config, 3, {request});
    ASSERT_TRUE(run.ok()) << run.status();
    ASSERT_THAT(run->results[0], SizeIs(6));
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(run->results[0][i].token_ids, apart->results[0][i].token_ids) << i;
    }
  }
}

TEST(EngineLifecycle, DataParallelAttentionSaysWhatItNeeds) {
  const auto refusal = [](EngineConfig config) {
    config.enable_dp_attention = true;
    const absl::Status status = RunRequests(config, 2, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(Config("gqa-a")), HasSubstr("a llama model has no latents"));
  EngineConfig config = Config("mla-v3");
  config.num_stripes = 2;
  EXPECT_THAT(refusal(config), HasSubstr("--decode-context-parallel-size 2: --enable-dp-attention "
                                         "keeps each sequence whole on one rank"));
  config = Config("mla-v3");
  config.use_kv_cache = false;
  EXPECT_THAT(refusal(config), HasSubstr("--no-kv-cache keeps none"));
  // The longest sequence is what one rank holds.
  config = Config("mla-v3");
  config.enable_dp_attention = true;
  config.num_kv_pages = 3;
  EXPECT_THAT(
      std::string(
          RunRequests(config, 2, {GreedyRequest(RandomPrompt(12, 1, 90), 1)}).status().message()),
      HasSubstr("the prompt needs room for 13 tokens; the cache has 12 for a sequence"));
}

TEST(EngineLifecycle, RowsOfDifferentKindsEqualTheirSoloRuns) {
  std::vector<Request> requests;
  for (int i = 0; i < 6; ++i) {
    Request neighbour = GreedyRequest(RandomPrompt(3, 90 + i), 12);  // with no seed of its own
    neighbour.params.temperature = 1.0;
    requests.push_back(std::move(neighbour));
    Request request = GreedyRequest(RandomPrompt(4 + i, 40 + i), 12);
    request.params.seed = 9;
    if (i == 1) request.params.top_k = 1, request.params.temperature = 1.0;
    if (i == 2) request.params.top_k = 5, request.params.temperature = 1.0;
    if (i == 3) request.params.top_p = 0.9, request.params.temperature = 1.0;
    if (i == 4) request.params.frequency_penalty = 1.05, request.params.repetition_penalty = 1.3;
    if (i == 5) request.params.min_p = 0.1, request.params.temperature = 0.7;
    requests.push_back(std::move(request));
  }
  const absl::StatusOr<EngineRun> together = RunRequests(Config(), 2, requests);
  ASSERT_TRUE(together.ok()) << together.status();
  for (size_t i = 1; i < requests.size(); i += 2) {
    EXPECT_EQ(together->results[i][0].token_ids, Alone(Config(), requests[i])) << i;
  }
}

TEST(EngineLifecycle, ASeedGivesTheSameEachTimeAndNoSeedDoesNot) {
  for (const int num_ranks : {1, 2}) {
    Request request = GreedyRequest(RandomPrompt(5, 70), 16);
    request.params.temperature = 1.0;
    Recorder recorder;
    const absl::Status status =
        WithEngine(Config(), num_ranks, recorder.callback(), [&](Engine& engine) -> absl::Status {
          for (const char* id : {"seed 1", "seed 2", "none 1", "none 2"}) {
            request.params.seed =
                id[0] == 's' ? std::optional<uint64_t>(42) : std::optional<uint64_t>();
            RETURN_IF_ERROR(engine.Submit(Named(id, request)));
            RETURN_IF_ERROR(engine.Drain());
          }
          return absl::OkStatus();
        });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(recorder.TokensOf("seed 1"), SizeIs(16));
    EXPECT_EQ(recorder.TokensOf("seed 1"), recorder.TokensOf("seed 2"));
    EXPECT_NE(recorder.TokensOf("none 1"), recorder.TokensOf("none 2"));
  }
}

TEST(EngineLifecycle, StopTokensEndASequenceAndCountAsOutput) {
  const Request request = GreedyRequest(RandomPrompt(6, 50), 12);
  const std::vector<int32_t> whole = Alone(Config(), request);
  // The first place where a token occurs that did not occur before.
  const size_t place = 4;
  const int32_t stop = whole[place];
  const auto first =
      static_cast<size_t>(std::find(whole.begin(), whole.end(), stop) - whole.begin());
  Request stopped = request;
  stopped.params.stop_token_ids = {stop};
  const absl::StatusOr<EngineRun> run = RunRequests(Config(), 2, {stopped});
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->results[0][0].token_ids,
            std::vector<int32_t>(whole.begin(), whole.begin() + static_cast<int64_t>(first) + 1));
  EXPECT_EQ(run->results[0][0].finish_reason, FinishReason::kStop);
  // Not before min_tokens: the stop token is never chosen there.
  stopped.params.min_tokens = static_cast<int64_t>(first) + 3;
  const absl::StatusOr<EngineRun> later = RunRequests(Config(), 2, {stopped});
  ASSERT_TRUE(later.ok()) << later.status();
  const std::vector<int32_t>& ids = later->results[0][0].token_ids;
  ASSERT_GE(ids.size(), first + 3);
  EXPECT_EQ(std::count(ids.begin(), ids.begin() + static_cast<int64_t>(first) + 2, stop), 0);
}

TEST(EngineLifecycle, LogprobsAreFiniteSortedAndOfTheRawDistribution) {
  Request request = GreedyRequest(RandomPrompt(6, 60), 5);
  request.params.logprobs = 5;
  request.params.top_k = 1;
  request.params.temperature = 0.01;
  const absl::StatusOr<EngineRun> run = RunRequests(Config(), 3, {request});
  ASSERT_TRUE(run.ok()) << run.status();
  const std::vector<PositionLogprobs>& logprobs = run->results[0][0].logprobs;
  ASSERT_THAT(logprobs, SizeIs(5));
  for (size_t i = 0; i < logprobs.size(); ++i) {
    EXPECT_EQ(logprobs[i].chosen.token_id, run->results[0][0].token_ids[i]);
    ASSERT_THAT(logprobs[i].top, SizeIs(5));
    EXPECT_EQ(logprobs[i].top[0].token_id, logprobs[i].chosen.token_id);
    for (size_t j = 0; j < 5; ++j) {
      EXPECT_GE(logprobs[i].top[j].logprob, -9999.0f);
      EXPECT_LE(logprobs[i].top[j].logprob, logprobs[i].top[j > 0 ? j - 1 : 0].logprob);
    }
    EXPECT_LT(logprobs[i].top[0].logprob, 0.0f);
  }
}

// A pool so small that hundreds of requests of all kinds preempt each other, and some are aborted.
TEST(EngineLifecycle, RandomTrafficDrainsASmallPool) {
  EngineConfig config = Config("gqa-odd");
  config.num_kv_pages = 12;
  config.prefill_chunk = 5;
  std::mt19937 random(3);
  const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
  Recorder recorder;
  int64_t num_preemptions = 0;
  const absl::Status status =
      WithEngine(config, 3, recorder.callback(), [&](Engine& engine) -> absl::Status {
        for (int i = 0; i < 200; ++i) {
          Request request = GreedyRequest(RandomPrompt(1 + below(30), below(20)), 1 + below(15));
          if (i % 3 == 0) request.params.temperature = 1.0;
          if (i % 7 == 0) request.params.n = 1 + below(3);
          RETURN_IF_ERROR(engine.Submit(Named(absl::StrCat(i), std::move(request))));
          if (below(10) == 0) engine.Abort(absl::StrCat(below(i + 1)));
          if (below(40) == 0) RETURN_IF_ERROR(engine.Drain());
        }
        RETURN_IF_ERROR(engine.Drain());
        num_preemptions = engine.stats().num_preemptions;
        EXPECT_EQ(engine.stats().num_running + engine.stats().num_waiting, 0);
        RETURN_IF_ERROR(engine.Submit(Named("all", GreedyRequest(RandomPrompt(40, 4), 8))));
        return engine.Drain();
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(recorder.outputs, SizeIs(201));
  EXPECT_GT(num_preemptions, 0);
  EXPECT_THAT(recorder.TokensOf("all"), SizeIs(8));
}

TEST(EngineLifecycle, LittleOfTheCacheIsWasted) {
  EngineConfig config = TestEngineConfig(absl::StrCat(HEDDLE_TESTS_DIR, "/golden/models/mqa"));
  config.load_format = LoadFormat::kDummy;
  config.max_num_seqs = 64;
  config.max_num_batched_tokens = 2048;
  config.num_kv_pages = 4096;
  config.verify_every_step = false;
  config.max_model_len = 128;
  std::mt19937 random(5);
  std::vector<Request> requests;
  for (int i = 0; i < 64; ++i) {
    const int64_t prompt = std::uniform_int_distribution<int64_t>(64, 100)(random);
    requests.push_back(GreedyRequest(RandomPrompt(prompt, i, 80), 128 - prompt - 1));
  }
  const absl::StatusOr<EngineRun> run = RunRequests(config, 1, requests);
  ASSERT_TRUE(run.ok()) << run.status();
  // Half a page a sequence is empty on average: 8 of about 100 tokens.
  EXPECT_GT(run->stats.kv_waste, 0.0);
  EXPECT_LT(run->stats.kv_waste, 0.12);
}

TEST(EngineLifecycle, TheCacheTakesTheBytesItIsGivenAndNoMore) {
  constexpr int64_t kBytes = 50'000;
  EngineConfig config = Config("gqa-odd");
  config.num_kv_pages.reset();
  config.kv_cache_memory_bytes = kBytes;
  for (const int num_ranks : {1, 2, 5}) {
    const absl::StatusOr<EngineRun> run =
        RunRequests(config, num_ranks, {GreedyRequest(RandomPrompt(9, 1), 4)});
    ASSERT_TRUE(run.ok()) << run.status();
    // Rank 0 has as many heads as any.
    const int64_t bytes_per_page = run->stats.kv_bytes_per_token * config.block_size;
    EXPECT_EQ(run->stats.total_kv_pages, kBytes / bytes_per_page) << num_ranks;
  }
}

TEST(EngineLifecycle, BadModelsAreRefusedOnAllRanksBeforeAnythingIsRead) {
  for (const int num_ranks : {1, 3}) {
    EngineConfig config = Config();
    config.model = "/nowhere";
    EXPECT_THAT(WithEngine(config, num_ranks, nullptr, nullptr).message(), HasSubstr("/nowhere"));
    config = Config();
    config.max_model_len = 4096;
    EXPECT_THAT(WithEngine(config, num_ranks, nullptr, nullptr).message(),
                HasSubstr("--max-model-len 4096 is above the model's limit of 128"));
    config = Config();
    config.max_num_batched_tokens = 4;
    EXPECT_THAT(WithEngine(config, num_ranks, nullptr, nullptr).message(),
                HasSubstr("--max-num-batched-tokens 4 is below --max-num-seqs 8"));
    config = Config();
    config.device = DeviceKind::kCuda;
    EXPECT_FALSE(WithEngine(config, num_ranks, nullptr, nullptr).ok());
  }
}

}  // namespace
}  // namespace heddle
