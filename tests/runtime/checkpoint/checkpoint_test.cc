#include "runtime/checkpoint/checkpoint.h"

#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/runtime/checkpoint/files.h"
#include "tests/support/golden.h"

namespace heddle {
namespace {

TEST(Checkpoint, OpensEveryGoldenModel) {
  for (const std::string& name : GoldenModelNames()) {
    SCOPED_TRACE(name);
    const auto golden = LoadGoldenModel(name);
    ASSERT_TRUE(golden.ok()) << golden.status();
    const auto checkpoint = OpenCheckpoint(golden->path, LoadFormat::kAuto, 0);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->spec.vocab_size, golden->vocab_size);
    const auto frequencies = InverseFrequencies(checkpoint->spec.rope, golden->max_model_len);
    ASSERT_EQ(frequencies.size(), golden->rope_inv_freq.size());
    for (size_t i = 0; i < frequencies.size(); ++i) {
      EXPECT_NEAR(frequencies[i] / golden->rope_inv_freq[i], 1.0, 1e-5) << i;
    }
    EXPECT_NEAR(AttentionFactor(checkpoint->spec.rope), golden->rope_attention_scaling, 1e-7);
  }
}

TEST(Checkpoint, SmolLm2) {
  const char* path = std::getenv("HEDDLE_SMOLLM2");
  if (path == nullptr) GTEST_SKIP() << "HEDDLE_SMOLLM2 is not set to the path of its GGUF file";
  const auto checkpoint = OpenCheckpoint(path, LoadFormat::kAuto, 0);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
}

}  // namespace
}  // namespace heddle
