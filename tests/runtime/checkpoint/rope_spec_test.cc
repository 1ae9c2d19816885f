#include "runtime/model/rope_spec.h"

#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/model/model_spec.h"
#include "tests/runtime/checkpoint/files.h"

namespace heddle {
namespace {

using nlohmann::json;

// Cases of tests/golden/rope, made by transformers in float32.
std::vector<json> GoldenCases() {
  return json::parse(ReadFile(HEDDLE_TESTS_DIR "/golden/rope/rope.json")).get<std::vector<json>>();
}

RopeSpec ParseRope(const json& config) {
  const auto spec = ParseModelConfig(config.dump(), "config.json");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? spec->rope : RopeSpec();
}

TEST(RopeSpec, MatchesTransformers) {
  const std::vector<json> cases = GoldenCases();
  ASSERT_GE(cases.size(), 15u);
  for (const json& golden : cases) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const RopeSpec rope = ParseRope(golden["config"]);
    const auto length = golden["max_model_len"].get<int64_t>();

    const auto expected = golden["inv_freq"].get<std::vector<double>>();
    const std::vector<double> frequencies = InverseFrequencies(rope, length);
    ASSERT_EQ(frequencies.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(frequencies[i] / expected[i], 1.0, 2e-6) << "frequency " << i;
    }
    EXPECT_NEAR(AttentionFactor(rope), golden["attention_factor"].get<double>(), 1e-12);

    const std::vector<float> table = CosSinTable(rope, length);
    for (const json& row : golden["rows"]) {
      const float* actual = table.data() + row["position"].get<int64_t>() * rope.rotary_dim;
      const auto cosines = row["cos"].get<std::vector<float>>();
      const auto sines = row["sin"].get<std::vector<float>>();
      for (size_t i = 0; i < cosines.size(); ++i) {
        // float32 holds an angle near 200 to 1.5e-5.
        EXPECT_NEAR(actual[i], cosines[i], 3e-5) << row["position"] << " " << i;
        EXPECT_NEAR(actual[cosines.size() + i], sines[i], 3e-5) << row["position"] << " " << i;
      }
    }
  }
}

TEST(RopeSpec, BothSpellingsOfTheConfigGiveOneTable) {
  for (const json& golden : GoldenCases()) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const json& config = golden["config"];
    json renamed = config;
    json parameters = renamed.value("rope_scaling", json::object());
    if (parameters.contains("type")) {
      parameters["rope_type"] = parameters["type"];
      parameters.erase("type");
    }
    parameters["rope_theta"] = renamed["rope_theta"];
    renamed.erase("rope_scaling");
    renamed.erase("rope_theta");
    renamed["rope_parameters"] = parameters;
    const auto length = golden["max_model_len"].get<int64_t>();
    EXPECT_EQ(CosSinTable(ParseRope(renamed), length), CosSinTable(ParseRope(config), length));
  }
}

TEST(RopeSpec, DynamicIsFrozenAtTheConfiguredLength) {
  RopeSpec rope;
  rope.rotary_dim = 16;
  rope.scaling = RopeSpec::Scaling::kDynamic;
  rope.factor = 4.0;
  rope.original_max_position_embeddings = 32;
  RopeSpec unscaled = rope;
  unscaled.scaling = RopeSpec::Scaling::kNone;

  EXPECT_EQ(InverseFrequencies(rope, 31), InverseFrequencies(unscaled, 31));
  EXPECT_EQ(InverseFrequencies(rope, 32), InverseFrequencies(unscaled, 32));
  const std::vector<double> longer = InverseFrequencies(rope, 33);
  EXPECT_EQ(longer[0], 1.0);
  for (size_t i = 1; i < longer.size(); ++i) {
    EXPECT_LT(longer[i], InverseFrequencies(rope, 32)[i]);
    EXPECT_GT(longer[i], InverseFrequencies(rope, 64)[i]);
  }
}

TEST(RopeSpec, FrequencyFactorsDivide) {
  RopeSpec rope;
  rope.rotary_dim = 8;
  rope.frequency_factors = {1.0f, 1.0f, 4.0f, 8.0f};
  const std::vector<double> divided = InverseFrequencies(rope, 16);
  rope.frequency_factors.clear();
  const std::vector<double> plain = InverseFrequencies(rope, 16);
  EXPECT_EQ(divided, (std::vector<double>{plain[0], plain[1], plain[2] / 4, plain[3] / 8}));
}

// llama3's blend, spelled out as a file's factors, is the same table.
TEST(RopeSpec, FrequencyFactorsExpressLlama3) {
  RopeSpec llama3;
  llama3.rotary_dim = 128;
  llama3.theta = 500000.0;
  RopeSpec factors = llama3;
  llama3.scaling = RopeSpec::Scaling::kLlama3;
  llama3.factor = 8.0;
  llama3.original_max_position_embeddings = 8192;
  for (int i = 0; i < 64; ++i) {
    const double wavelength = 2 * std::numbers::pi * std::pow(500000.0, i / 64.0);
    const double smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
    double factor = 1.0 / ((1.0 - smooth) / 8.0 + smooth);
    if (wavelength < 8192.0 / 4.0) factor = 1.0;
    if (wavelength > 8192.0 / 1.0) factor = 8.0;
    factors.frequency_factors.push_back(static_cast<float>(factor));
  }
  const std::vector<double> expected = InverseFrequencies(llama3, 100);
  const std::vector<double> actual = InverseFrequencies(factors, 100);
  for (int i = 0; i < 64; ++i) EXPECT_NEAR(actual[i] / expected[i], 1.0, 1e-7) << i;
}

// The table's angles are exact far out, where float32 products have lost whole radians.
TEST(RopeSpec, AnglesAreFloat64) {
  RopeSpec rope;
  rope.rotary_dim = 4;
  rope.theta = 10000.0;
  const int64_t length = 1'000'001;
  const std::vector<float> table = CosSinTable(rope, length);
  const double angle = 1e6 * 0.01;
  EXPECT_EQ(table[(length - 1) * 4 + 1], static_cast<float>(std::cos(angle)));
  EXPECT_EQ(table[(length - 1) * 4 + 3], static_cast<float>(std::sin(angle)));
}

}  // namespace
}  // namespace heddle
