// The program as users start it, ranks under mpirun, against transformers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

using Json = nlohmann::json;

// Where the best two logits are nearer than this, rounding may choose the other one.
constexpr float kMargin = 1e-3f;

// Runs `heddle arguments` on so many ranks with `input` as its file; gives the lines of its stdout.
std::vector<Json> RunHeddle(int num_ranks, const std::string& arguments,
                            const std::string& input_flag, const std::vector<Json>& input) {
  const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) /
      absl::StrCat("heddle_", getpid(), "_", std::hash<std::string>()(name), ".jsonl");
  {
    std::ofstream file(path);
    for (const Json& row : input) file << row.dump() << "\n";
  }
  const std::string command = absl::StrCat(HEDDLE_MPIEXEC, " -n ", num_ranks, " ", HEDDLE_PROGRAM,
                                           " ", arguments, " ", input_flag, " ", path.string());
  SCOPED_TRACE(command);
  FILE* const job = popen(command.c_str(), "r");
  std::string output;
  std::array<char, 1 << 16> buffer;
  while (const size_t size = std::fread(buffer.data(), 1, buffer.size(), job)) {
    output.append(buffer.data(), size);
  }
  EXPECT_EQ(WEXITSTATUS(pclose(job)), 0);
  std::filesystem::remove(path);
  std::vector<Json> lines;
  std::istringstream stream(output);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(Json::parse(line, nullptr, /*allow_exceptions=*/false));
    EXPECT_FALSE(lines.back().is_discarded()) << "not JSON: " << line;
  }
  // In particular no rank but 0 prints.
  EXPECT_EQ(lines.size(), input.size());
  lines.resize(input.size());
  return lines;
}

absl::StatusOr<GoldenModel> LoadEither(const std::string& name) {
  const std::vector<std::string> ggufs = GoldenGgufNames();
  const bool gguf = std::find(ggufs.begin(), ggufs.end(), name) != ggufs.end();
  return gguf ? LoadGoldenGguf(name) : LoadGoldenModel(name);
}

// What the two token sequences are compared by: up to where rounding may have decided.
void ExpectSameChoices(const std::vector<GoldenStep>& expected, const std::vector<int32_t>& actual,
                       int& num_compared) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size() && expected[i].top2_gap >= kMargin; ++i, ++num_compared) {
    ASSERT_EQ(actual[i], expected[i].token_id) << "token " << i;
  }
}

struct Run {
  std::string model;
  int num_ranks = 1;
  std::string flags;
};
void PrintTo(const Run& run, std::ostream* out) {
  *out << run.model << " on " << run.num_ranks << ": " << run.flags;
}

class ScoreTest : public ::testing::TestWithParam<Run> {};
INSTANTIATE_TEST_SUITE_P(
    Mpirun, ScoreTest,
    ::testing::Values(Run{"gqa-a", 1, "--score-mode decode"},
                      Run{"gqa-a", 8, "--score-mode prefill --prefill-chunk 7"},
                      Run{"gqa-odd", 2, "--score-mode decode --block-size 3"},
                      Run{"mqa-two-shards", 3, "--score-mode prefill --block-size 1"},
                      Run{"mistral-window", 4, "--score-mode decode --block-size 3"},
                      Run{"rope-dynamic", 2, "--score-mode prefill"},
                      Run{"llama-k-rope-freqs", 5, "--activation-dtype float32"}));

TEST_P(ScoreTest, GivesTheLogitsOfTransformers) {
  const absl::StatusOr<GoldenModel> model = LoadEither(GetParam().model);
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<Json> input;
  for (const GoldenPrompt& prompt : model->prompts) {
    input.push_back({{"id", prompt.id}, {"token_ids", prompt.token_ids}});
  }
  const std::vector<Json> lines = RunHeddle(
      GetParam().num_ranks,
      absl::StrCat("score --logits --model ", model->path, " --max-model-len ",
                   model->max_model_len, " --kv-cache-memory-bytes 16777216 ", GetParam().flags),
      "--input", input);
  for (size_t i = 0; i < lines.size(); ++i) {
    const GoldenPrompt& prompt = model->prompts[i];
    SCOPED_TRACE(prompt.id);
    ASSERT_TRUE(lines[i].contains("logits")) << lines[i];
    EXPECT_EQ(lines[i].at("id"), prompt.id);
    std::vector<float> logits;
    for (const Json& row : lines[i].at("logits")) {
      for (const Json& logit : row) logits.push_back(logit);
    }
    EXPECT_LE(LogitsDifference(prompt.logits, logits), 1e-5);
  }
}

class GenerateTest : public ::testing::TestWithParam<Run> {};
INSTANTIATE_TEST_SUITE_P(Mpirun, GenerateTest,
                         ::testing::Values(Run{"hd", 3, "--prefill-chunk 7"},
                                           Run{"qw2", 5, "--num-kv-pages 12 --max-num-seqs 3"},
                                           Run{"qwen3", 2, "--no-enable-prefix-caching"},
                                           Run{"tied", 4, "--no-kv-cache"},
                                           Run{"qwen2-q4_1", 2, "--activation-dtype float32"}));

TEST_P(GenerateTest, ChoosesTheTokensOfTransformers) {
  const absl::StatusOr<GoldenModel> model = LoadEither(GetParam().model);
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<Json> input;
  for (const GoldenPrompt& prompt : model->prompts) {
    input.push_back({{"id", prompt.id}, {"prompt_token_ids", prompt.token_ids}});
  }
  const std::vector<Json> lines =
      RunHeddle(GetParam().num_ranks,
                absl::StrCat("generate --temperature 0 --ignore-eos --max-tokens ",
                             model->prompts[0].greedy.size(), " --model ", model->path,
                             " --kv-cache-memory-bytes 16777216 ", GetParam().flags),
                "--prompt-file", input);
  int num_compared = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    SCOPED_TRACE(model->prompts[i].id);
    ASSERT_TRUE(lines[i].contains("token_ids")) << lines[i];
    ExpectSameChoices(model->prompts[i].greedy, lines[i].at("token_ids"), num_compared);
  }
  EXPECT_GE(num_compared, 0.9 * lines.size() * model->prompts[0].greedy.size());
}

class SmolLm2CommandTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Mpirun, SmolLm2CommandTest, ::testing::Values(2));
INSTANTIATE_TEST_SUITE_P(Nightly, SmolLm2CommandTest, ::testing::Values(1, 3, 4, 5));

// All texts at once, from text to text, in a pool that they share.
TEST_P(SmolLm2CommandTest, WritesTheTextOfTransformers) {
  const char* path = std::getenv("HEDDLE_SMOLLM2");
  if (path == nullptr) {
    GTEST_SKIP() << "HEDDLE_SMOLLM2 is not set; launch/fetch_model.sh prints what to set it to";
  }
  const absl::StatusOr<GoldenSmolLm2> golden = LoadGoldenSmolLm2();
  ASSERT_TRUE(golden.ok()) << golden.status();
  std::vector<Json> input;
  for (const GoldenText& text : golden->texts) {
    input.push_back({{"id", text.id}, {"prompt", text.text}});
  }
  const std::vector<Json> lines =
      RunHeddle(GetParam(),
                absl::StrCat("generate --temperature 0 --ignore-eos --max-tokens 64 --model ", path,
                             " --activation-dtype float32 --max-model-len 512",
                             " --kv-cache-memory-bytes 268435456"),
                "--prompt-file", input);
  int num_compared = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    SCOPED_TRACE(golden->texts[i].id);
    ASSERT_TRUE(lines[i].contains("token_ids")) << lines[i];
    EXPECT_EQ(lines[i].at("prompt_token_ids"), Json(golden->texts[i].token_ids));
    ExpectSameChoices(golden->texts[i].greedy, lines[i].at("token_ids"), num_compared);
  }
  EXPECT_GE(num_compared, 0.9 * lines.size() * 64);
}

}  // namespace
}  // namespace heddle
