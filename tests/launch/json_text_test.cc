#include "launch/json_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace heddle {
namespace {

std::string FloatText(float value) {
  std::string json;
  AppendJsonFloat(value, json);
  return json;
}

TEST(JsonText, StringsAreEscapedAndValidUtf8) {
  std::string json;
  AppendJsonString("a\"\\\n\t\x01 \xc3\xa9 \xff end", json);
  EXPECT_EQ(json, "\"a\\\"\\\\\\n\\t\\u0001 \xc3\xa9 \xef\xbf\xbd end\"");
}

TEST(JsonText, FloatsReadBackAsTheSameNumber) {
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    float value;
    static_assert(sizeof(value) == sizeof(bits));
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isfinite(value)) continue;
    EXPECT_EQ(std::strtof(FloatText(value).c_str(), nullptr), value);
  }
  EXPECT_EQ(FloatText(-9999.0f), "-9999");
  EXPECT_EQ(FloatText(0.1f), "0.1");
  EXPECT_EQ(FloatText(std::numeric_limits<float>::infinity()), "null");
  EXPECT_EQ(FloatText(std::numeric_limits<float>::quiet_NaN()), "null");
}

TEST(JsonText, ListsHaveCommasBetween) {
  std::string json;
  AppendJsonIds(std::vector<int32_t>{}, json);
  AppendJsonIds(std::vector<int32_t>{1, -2}, json);
  AppendJsonFloats(std::vector<float>{0.5f, 2.0f}, json);
  EXPECT_EQ(json, "[][1,-2][0.5,2]");
}

}  // namespace
}  // namespace heddle
