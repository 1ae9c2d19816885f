#include "tests/runtime/checkpoint/parse_config.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heddle {

using nlohmann::json;
using ::testing::HasSubstr;

json With(json config, const json& changes) {
  config.update(changes);
  return config;
}

ModelSpec Parse(const json& config) {
  const auto spec = ParseModelConfig(config.dump(), "config.json");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : ModelSpec();
}

std::string ErrorOfText(absl::string_view text) {
  const auto spec = ParseModelConfig(text, "dir/config.json");
  EXPECT_FALSE(spec.ok()) << text.substr(0, 200);
  if (spec.ok()) return "";
  EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(spec.status().message()), HasSubstr("dir/config.json"));
  return std::string(spec.status().message());
}

std::string Error(const json& config) { return ErrorOfText(config.dump()); }

std::vector<std::string> TensorNames(const ModelSpec& spec) {
  std::vector<std::string> names;
  for (const ExpectedTensor& tensor : ExpectedTensors(spec)) names.push_back(tensor.name);
  return names;
}

}  // namespace heddle
