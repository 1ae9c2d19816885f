#include "launch/command_line.h"

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

CommandLine Accepted(std::vector<std::string> arguments) {
  ParsedCommandLine parsed = ParseCommandLine(arguments);
  EXPECT_TRUE(parsed.command_line.has_value()) << parsed.exit.text;
  return parsed.command_line.value_or(CommandLine());
}

std::string Refused(std::vector<std::string> arguments) {
  const ParsedCommandLine parsed = ParseCommandLine(arguments);
  EXPECT_FALSE(parsed.command_line.has_value());
  EXPECT_EQ(parsed.exit.exit_code, 2);
  return parsed.exit.text;
}

TEST(CommandLine, DashesAndUnderscoresAreTheSameInNamesOnly) {
  const CommandLine line = Accepted({"generate", "--model", "my_model", "--prompt=a_b",
                                     "--max_num_seqs=7", "--tensor_parallel_size", "2"});
  EXPECT_EQ(line.engine.max_num_seqs, 7);
  EXPECT_EQ(line.parallel.tensor_parallel_size, 2);
  EXPECT_EQ(line.engine.model, "my_model");
  EXPECT_THAT(line.generate.prompts, ElementsAre("a_b"));
}

TEST(CommandLine, CountsTakeSuffixes) {
  EXPECT_EQ(*ParseCount("2k"), 2000);
  EXPECT_EQ(*ParseCount("2K"), 2048);
  EXPECT_EQ(*ParseCount("1M"), 1048576);
  EXPECT_EQ(*ParseCount("0"), 0);
  for (const char* bad : {"", "k", "-1", "1.5", "1kk", "12x", "9223372036854775807K", "0x10"}) {
    EXPECT_FALSE(ParseCount(bad).ok()) << bad;
  }
  const CommandLine line = Accepted(
      {"bench", "throughput", "-m", "x", "--input-len", "1K", "--kv-cache-memory-bytes", "2G"});
  EXPECT_EQ(line.bench.input_len, 1024);
  EXPECT_EQ(line.engine.kv_cache_memory_bytes, int64_t{2} << 30);
}

TEST(CommandLine, RepeatableFlagsKeepTheirOrder) {
  const CommandLine line =
      Accepted({"generate", "--model", "m", "--prompt", "one", "--prompt", "two words", "--stop",
                "\n", "--stop", "END", "--stop-token-ids", "3,1,2"});
  EXPECT_THAT(line.generate.prompts, ElementsAre("one", "two words"));
  EXPECT_THAT(line.sampling.stop, ElementsAre("\n", "END"));
  EXPECT_THAT(line.sampling.stop_token_ids, ElementsAre(3, 1, 2));
}

TEST(CommandLine, AnEmptyPromptAndADashedPromptAreValues) {
  EXPECT_THAT(Accepted({"generate", "--model", "m", "--prompt", ""}).generate.prompts,
              ElementsAre(""));
  EXPECT_THAT(Accepted({"generate", "--model", "m", "--prompt=--not_a_flag"}).generate.prompts,
              ElementsAre("--not_a_flag"));
}

TEST(CommandLine, BenchesRunWithTheirDefaults) {
  const CommandLine line = Accepted({"bench", "latency", "-m", "x"});
  EXPECT_EQ(line.bench.input_len, 32);
  EXPECT_EQ(line.bench.output_len, 128);
  EXPECT_EQ(line.bench.num_prompts, 64);
  EXPECT_THAT(line.bench.batch_sizes, ElementsAre(8));
}

TEST(CommandLine, BatchSweepsTakeLists) {
  const CommandLine line = Accepted({"bench", "batch", "-m", "x", "--batch_size", "1,64,8",
                                     "--input-len", "128,4K", "--dcp", "1,auto,4"});
  EXPECT_EQ(line.command, Command::kBenchBatch);
  EXPECT_THAT(line.bench_batch.batch_sizes, ElementsAre(1, 64, 8));
  EXPECT_THAT(line.bench_batch.input_lens, ElementsAre(128, 4096));
  EXPECT_THAT(line.bench_batch.num_stripes, ElementsAre(1, std::nullopt, 4));
  EXPECT_EQ(line.engine.num_stripes, std::nullopt);
  EXPECT_EQ(line.engine.max_num_seqs, 64);

  const CommandLine defaults = Accepted({"bench", "batch", "-m", "x", "--max-num-seqs", "100"});
  EXPECT_THAT(defaults.bench_batch.batch_sizes, ElementsAre(1, 8, 32));
  EXPECT_THAT(defaults.bench_batch.input_lens, ElementsAre(128, 1024));
  EXPECT_THAT(defaults.bench_batch.num_stripes, ElementsAre(std::nullopt));
  EXPECT_EQ(defaults.engine.max_num_seqs, 100);

  for (const char* stripes : {"1,,2", "0", "1,x", "auto,", "1 2"}) {
    EXPECT_THAT(Refused({"bench", "batch", "-m", "x", "--dcp", stripes}),
                HasSubstr("is neither auto nor a count"))
        << stripes;
  }
  // Only a sweep runs more than one placement.
  EXPECT_THAT(Refused({"bench", "latency", "-m", "x", "--dcp", "1,2"}),
              HasSubstr("\"1,2\" is neither auto nor a count"));
  EXPECT_THAT(Refused({"bench", "batch", "-m", "x", "--input-len", "1,-2"}),
              HasSubstr("--input-len"));
}

TEST(CommandLine, PlansTakeLists) {
  const CommandLine line =
      Accepted({"plan", "-m", "x", "--device_type", "A6000", "--batch-size", "1,2k",
                "--context-len", "1K", "--max-num-seqs", "16", "--format", "json"});
  EXPECT_EQ(line.command, Command::kPlan);
  EXPECT_EQ(line.plan.device_type, "A6000");
  EXPECT_THAT(line.plan.batch_sizes, ElementsAre(1, 2000));
  EXPECT_THAT(line.plan.context_lens, ElementsAre(1024));
  EXPECT_EQ(line.plan.max_num_seqs, 16);
  EXPECT_EQ(line.output_format, "json");

  const CommandLine defaults = Accepted({"plan", "-m", "x"});
  EXPECT_EQ(defaults.plan.device_type, "cpu");
  EXPECT_THAT(defaults.plan.batch_sizes, ElementsAre(1, 8, 32, 128, 512));
  EXPECT_THAT(defaults.plan.context_lens, ElementsAre());
  EXPECT_FALSE(defaults.plan.max_num_seqs.has_value());
  EXPECT_EQ(defaults.output_format, "text");
}

TEST(CommandLine, MaxTokensMayBeUnlimited) {
  EXPECT_EQ(Accepted({"generate", "-m", "m", "--prompt", "x"}).sampling.max_tokens, 16);
  EXPECT_EQ(
      Accepted({"generate", "-m", "m", "--prompt", "x", "--max-tokens", "0"}).sampling.max_tokens,
      0);
  EXPECT_EQ(Accepted({"generate", "-m", "m", "--prompt", "x", "--max-tokens", "none"})
                .sampling.max_tokens,
            std::nullopt);
}

TEST(CommandLine, SaysWhatIsWrong) {
  EXPECT_THAT(Refused({}), HasSubstr("no command"));
  EXPECT_THAT(Refused({"generate", "--prompt", "x"}), HasSubstr("--model"));
  EXPECT_THAT(Refused({"generate", "--model", "m"}), HasSubstr("--prompt"));
  EXPECT_THAT(Refused({"generate", "--model", "m", "--prompt", "x", "--temprature", "1"}),
              HasSubstr("did you mean --temperature?"));
  EXPECT_THAT(Refused({"generate", "--model", "m", "--prompt", "x", "--dtype", "fp8"}),
              HasSubstr("--dtype: \"fp8\" is not one of auto, float32, bfloat16, float16"));
  EXPECT_THAT(Refused({"generate", "--model", "m", "--prompt", "x", "--max-num-seqs", "many"}),
              HasSubstr("\"many\" is not a count"));
  EXPECT_THAT(Refused({"bench", "latency", "--model", "m", "--batch-size", "1,x"}),
              HasSubstr("--batch-size"));
  EXPECT_THAT(Refused({"generate", "--model", "m", "--prompt", "x", "--enable-prefix-caching",
                       "--no-enable-prefix-caching"}),
              HasSubstr("exclude each other"));
  EXPECT_THAT(Refused({"generate", "--model", "m", "--prompt", "x", "stray"}), HasSubstr("stray"));
}

TEST(CommandLine, HelpAndVersionSucceed) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"}, {"--version"}, {"bench", "latency", "--help"}}) {
    const ParsedCommandLine parsed = ParseCommandLine(arguments);
    EXPECT_FALSE(parsed.command_line.has_value());
    EXPECT_EQ(parsed.exit.exit_code, 0);
    EXPECT_THAT(parsed.exit.text, HasSubstr("heddle"));
  }
}

class ConfigFile : public ::testing::Test {
 protected:
  std::string Write(const std::string& text) {
    const std::string path = ::testing::TempDir() + "heddle_config.yaml";
    std::ofstream(path) << text;
    return path;
  }
};

TEST_F(ConfigFile, FlagsBeatItAndKeysAreFlagNames) {
  const std::string path = Write(
      "model: from-file\nmax-num-seqs: 3\nblock_size: 64\nprompt: [a, b]\nno-kv-cache: true\n"
      "ignore-eos: false\n");
  const CommandLine line = Accepted({"generate", "--config", path, "--max-num-seqs", "9"});
  EXPECT_EQ(line.engine.model, "from-file");
  EXPECT_EQ(line.engine.max_num_seqs, 9);
  EXPECT_EQ(line.engine.block_size, 64);
  EXPECT_FALSE(line.engine.use_kv_cache);
  EXPECT_FALSE(line.sampling.ignore_eos);
  EXPECT_THAT(line.generate.prompts, ElementsAre("a", "b"));
}

TEST_F(ConfigFile, BadFilesAreNamed) {
  EXPECT_THAT(Refused({"generate", "--config", "/nowhere.yaml"}), HasSubstr("/nowhere.yaml"));
  EXPECT_THAT(Refused({"generate", "--config", Write("- 1\n- 2\n")}), HasSubstr("map"));
  EXPECT_THAT(Refused({"generate", "--config", Write("model: {a: b}\n")}), HasSubstr("model"));
  EXPECT_THAT(Refused({"generate", "--config", Write("a: [\n")}), HasSubstr("--config"));
  EXPECT_THAT(Refused({"generate", "--config", Write("model: m\nprompt: x\nmax-seqs: 1\n")}),
              HasSubstr("unknown flag --max-seqs"));
}

}  // namespace
}  // namespace heddle
