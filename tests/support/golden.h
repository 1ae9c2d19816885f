// Reads the expectations of tests/golden: what transformers says of the models kept there.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// A token that greedy decoding chose, and how clearly: where the gap between the two best logits
// is below a test's margin, rounding may choose the other one.
struct GoldenStep {
  int32_t token_id = 0;
  float top2_gap = 0;
  // Of the position that chose the token; see GoldenPrompt. Infinity for models without experts.
  float router_margin = std::numeric_limits<float>::infinity();
};

struct GoldenPrompt {
  std::string id;
  std::vector<int32_t> token_ids;
  std::vector<GoldenStep> greedy;  // continues token_ids, teacher-forced by itself
  std::span<const float> logits;   // [token_ids.size(), vocab_size], owned by the GoldenModel
  // [token_ids.size()] for each position the smallest gap over all layers between the score of the
  // last expert (or group of experts) that is chosen and the first that is not. Empty for models
  // without experts.
  std::vector<float> router_margins;
};

// How many positions of `prompt` and its continuation, from the first on, are routed by `margin` or
// more: those to compare. Where rounding may choose another expert, it changes what follows too.
// Position p < token_ids.size() gives logits' row p; the last of them chooses greedy[0], the next
// position greedy[1], and so on.
int64_t NumClearlyRouted(const GoldenPrompt& prompt, float margin);

// A model of tests/golden/models or tests/golden/gguf. Move-only: the prompts point into `logits`.
struct GoldenModel {
  GoldenModel() = default;
  GoldenModel(GoldenModel&&) = default;
  GoldenModel& operator=(GoldenModel&&) = default;

  std::string path;  // what --model takes: a directory, or a .gguf file
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;  // the expectations hold for this --max-model-len
  std::vector<float> rope_inv_freq;
  float rope_attention_scaling = 1;
  std::vector<GoldenPrompt> prompts;
  std::vector<float> logits;
};

// By name, as listed by GoldenModelNames ("gqa-a") or GoldenGgufNames ("llama-q8_0").
absl::StatusOr<GoldenModel> LoadGoldenModel(absl::string_view name);
absl::StatusOr<GoldenModel> LoadGoldenGguf(absl::string_view name);
std::vector<std::string> GoldenModelNames();
// Those with neither latent attention nor experts.
std::vector<std::string> GoldenLlamaModelNames();
std::vector<std::string> GoldenGgufNames();

// A text of tests/golden/smollm2.json: what the real model makes of it, weights de-quantised.
struct GoldenText {
  std::string id;
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<GoldenStep> greedy;
  std::vector<float> token_logprobs;  // of token_ids and greedy but the first, given what precedes
};

// Perplexity of a text cut into windows of tokens, each scored from its second token on.
struct GoldenPerplexity {
  std::string text_path;
  int64_t window = 0;  // tokens
  int64_t num_tokens = 0;
  double value = 0;
};

struct GoldenSmolLm2 {
  GoldenPerplexity perplexity;
  std::vector<GoldenText> texts;
};
absl::StatusOr<GoldenSmolLm2> LoadGoldenSmolLm2();

// What Hugging Face's tokenizers say of a string; `decoded` shows added tokens.
struct GoldenString {
  std::string text;
  std::vector<int32_t> token_ids;
  std::string decoded;
};
absl::StatusOr<std::vector<GoldenString>> LoadGoldenSmolLm2Strings();

// Largest |actual - expected| over (largest - smallest expected): the share of the logits' range by
// which two sets of logits differ. Infinity where sizes differ or a value is not finite.
double LogitsDifference(std::span<const float> expected, std::span<const float> actual);

}  // namespace heddle
