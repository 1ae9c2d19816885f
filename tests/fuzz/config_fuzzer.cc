// Any bytes as a config.json or generation_config.json: refused, or a model that makes sense.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/base/logging.h"
#include "runtime/checkpoint/generation_defaults.h"
#include "runtime/model/model_spec.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  (void)heddle::ParseGenerationConfig(text, "generation_config.json", 1000);
  const auto spec = heddle::ParseModelConfig(text, "config.json");
  if (!spec.ok()) return 0;
  CHECK(heddle::FindSpecProblems(*spec).empty());
  CHECK_EQ(static_cast<int64_t>(spec->windows.size()), spec->num_layers);
  for (const int64_t length : {int64_t{1}, spec->max_position_embeddings, int64_t{1} << 31}) {
    for (const double frequency : heddle::InverseFrequencies(spec->rope, length)) {
      CHECK(std::isfinite(frequency) && frequency >= 0.0);
    }
  }
  CHECK(std::isfinite(heddle::AttentionFactor(spec->rope)));
  const double scale = heddle::AttentionScale(*spec);
  CHECK(std::isfinite(scale) && scale > 0.0);
  const int64_t num_experts = spec->moe ? spec->moe->num_experts : 0;
  if (spec->num_layers * (1 + num_experts) <= 1024) {
    for (const heddle::ExpectedTensor& tensor : heddle::ExpectedTensors(*spec)) {
      CHECK(!heddle::IsIgnorableTensor(*spec, tensor.name));
    }
  }
  return 0;
}
