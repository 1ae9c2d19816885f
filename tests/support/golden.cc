#include "tests/support/golden.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

using Json = nlohmann::json;

const std::filesystem::path kGoldenDir = std::filesystem::path(HEDDLE_TESTS_DIR) / "golden";

absl::StatusOr<std::vector<float>> ReadFloats(const std::filesystem::path& path, size_t count) {
  std::vector<float> values(count);
  const auto num_bytes = static_cast<std::streamsize>(count * sizeof(float));
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), num_bytes);
  if (file.gcount() != num_bytes || file.peek() != std::ifstream::traits_type::eof()) {
    return absl::DataLossError(absl::StrCat(path.string(), ": ", num_bytes, " bytes expected"));
  }
  return values;
}

absl::StatusOr<Json> ReadJson(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("no expectations at ", path.string()));
  return Json::parse(file);
}

std::vector<GoldenStep> ParseGreedy(const Json& json) {
  std::vector<GoldenStep> steps;
  const Json& ids = json.at("greedy_token_ids");
  const Json& gaps = json.at("greedy_top2_gaps");
  const auto margins = json.find("greedy_router_margins");
  for (size_t i = 0; i < ids.size(); ++i) {
    steps.push_back({.token_id = ids.at(i), .top2_gap = gaps.at(i)});
    if (margins != json.end()) steps.back().router_margin = margins->at(i);
  }
  return steps;
}

GoldenPrompt ParsePrompt(const Json& json, const GoldenModel& model) {
  GoldenPrompt prompt;
  prompt.id = json.at("id");
  prompt.token_ids = json.at("token_ids").get<std::vector<int32_t>>();
  prompt.greedy = ParseGreedy(json);
  prompt.router_margins = json.value("router_margins", std::vector<float>());
  const size_t first = json.at("logits_row").get<size_t>() * model.vocab_size;
  prompt.logits =
      std::span(model.logits).subspan(first, prompt.token_ids.size() * model.vocab_size);
  return prompt;
}

absl::StatusOr<GoldenModel> LoadExpectations(const std::filesystem::path& path,
                                             const std::filesystem::path& json_path,
                                             const std::filesystem::path& logits_path) {
  ASSIGN_OR_RETURN(const Json json, ReadJson(json_path));
  GoldenModel model;
  model.path = path.string();
  model.vocab_size = json.at("vocab_size");
  model.max_model_len = json.at("max_model_len");
  model.rope_inv_freq = json.at("rope_inv_freq").get<std::vector<float>>();
  model.rope_attention_scaling = json.at("rope_attention_scaling");
  const size_t num_rows = json.at("num_logits_rows");
  ASSIGN_OR_RETURN(model.logits, ReadFloats(logits_path, num_rows * model.vocab_size));
  for (const Json& prompt : json.at("prompts")) model.prompts.push_back(ParsePrompt(prompt, model));
  return model;
}

// Names of the entries of tests/golden/`folder` that have a file called name + `suffix`, sorted.
std::vector<std::string> NamesIn(absl::string_view folder, absl::string_view suffix) {
  std::vector<std::string> names;
  const std::filesystem::path directory = kGoldenDir / std::string(folder);
  if (!std::filesystem::exists(directory)) return names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string stem = entry.path().stem().string();
    if (std::filesystem::exists(directory / absl::StrCat(stem, suffix))) names.push_back(stem);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

absl::StatusOr<GoldenModel> LoadGoldenModel(absl::string_view name) {
  const std::filesystem::path directory = kGoldenDir / "models" / std::string(name);
  return LoadExpectations(directory, directory / "expect.json", directory / "logits.f32");
}

absl::StatusOr<GoldenModel> LoadGoldenGguf(absl::string_view name) {
  const std::filesystem::path stem = kGoldenDir / "gguf" / std::string(name);
  return LoadExpectations(stem.string() + ".gguf", stem.string() + ".json", stem.string() + ".f32");
}

std::vector<std::string> GoldenModelNames() { return NamesIn("models", "/expect.json"); }
std::vector<std::string> GoldenGgufNames() { return NamesIn("gguf", ".gguf"); }

std::vector<std::string> GoldenLlamaModelNames() {
  std::vector<std::string> names = GoldenModelNames();
  std::erase_if(names, [](const std::string& name) {
    const absl::StatusOr<Json> config = ReadJson(kGoldenDir / "models" / name / "config.json");
    return config.ok() &&
           (config->contains("kv_lora_rank") || config->contains("num_experts_per_tok"));
  });
  return names;
}

int64_t NumClearlyRouted(const GoldenPrompt& prompt, float margin) {
  int64_t count = 0;
  for (const float actual : prompt.router_margins) {
    if (actual < margin) return count;
    ++count;
  }
  if (prompt.router_margins.empty()) count = static_cast<int64_t>(prompt.token_ids.size());
  // The first step is the last position of the prompt again.
  for (size_t step = 1; step < prompt.greedy.size(); ++step, ++count) {
    if (prompt.greedy[step].router_margin < margin) return count;
  }
  return count;
}

absl::StatusOr<GoldenSmolLm2> LoadGoldenSmolLm2() {
  ASSIGN_OR_RETURN(const Json json, ReadJson(kGoldenDir / "smollm2.json"));
  GoldenSmolLm2 golden;
  const Json& perplexity = json.at("perplexity");
  golden.perplexity.text_path =
      (kGoldenDir / perplexity.at("text_file").get<std::string>()).string();
  golden.perplexity.window = perplexity.at("window");
  golden.perplexity.num_tokens = perplexity.at("num_tokens");
  golden.perplexity.value = perplexity.at("value");
  for (const Json& prompt : json.at("prompts")) {
    golden.texts.push_back({.id = prompt.at("id"),
                            .text = prompt.at("text"),
                            .token_ids = prompt.at("token_ids"),
                            .greedy = ParseGreedy(prompt),
                            .token_logprobs = prompt.at("token_logprobs")});
  }
  return golden;
}

absl::StatusOr<std::vector<GoldenString>> LoadGoldenSmolLm2Strings() {
  ASSIGN_OR_RETURN(const Json json, ReadJson(kGoldenDir / "smollm2_tokenizer.json"));
  std::vector<GoldenString> strings;
  for (const Json& row : json.at("strings")) {
    strings.push_back({row.at("text"), row.at("ids"), row.at("decoded")});
  }
  return strings;
}

double LogitsDifference(std::span<const float> expected, std::span<const float> actual) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (expected.empty() || expected.size() != actual.size()) return kInfinity;
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(double{actual[i]} - double{expected[i]});
    if (!std::isfinite(difference)) return kInfinity;
    largest = std::max(largest, difference);
  }
  const auto [low, high] = std::minmax_element(expected.begin(), expected.end());
  return largest / (double{*high} - double{*low});
}

}  // namespace heddle
