#include "runtime/model/rope_spec.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/base/logging.h"

namespace heddle {
namespace {

// Theta at which the longest wavelength covers `max_model_len` as it covered the original length.
double DynamicTheta(const RopeSpec& rope, int64_t max_model_len) {
  const double length = static_cast<double>(max_model_len);
  const double original = static_cast<double>(rope.original_max_position_embeddings);
  if (length <= original || rope.rotary_dim <= 2) return rope.theta;
  const double dim = static_cast<double>(rope.rotary_dim);
  const double stretch = rope.factor * length / original - (rope.factor - 1.0);
  return rope.theta * std::pow(stretch, dim / (dim - 2.0));
}

double Llama3Frequency(const RopeSpec& rope, double frequency) {
  const double original = static_cast<double>(rope.original_max_position_embeddings);
  const double rotations = original * frequency / (2.0 * std::numbers::pi);
  const double blend =
      (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  const double kept = std::clamp(blend, 0.0, 1.0);
  return frequency * (kept + (1.0 - kept) / rope.factor);
}

// The dimension (a real number) that makes `rotations` turns over the original length.
double YarnDimension(const RopeSpec& rope, double rotations) {
  const double original = static_cast<double>(rope.original_max_position_embeddings);
  return static_cast<double>(rope.rotary_dim) *
         std::log(original / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(rope.theta));
}

void ApplyYarn(const RopeSpec& rope, std::vector<double>& frequencies) {
  double low = YarnDimension(rope, rope.beta_fast);
  double high = YarnDimension(rope, rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rope.rotary_dim - 1));
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double divided = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] *= 1.0 - divided + divided / rope.factor;
  }
}

double YarnMagnitude(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

}  // namespace

std::vector<double> InverseFrequencies(const RopeSpec& rope, int64_t max_model_len) {
  const double theta =
      rope.scaling == RopeSpec::Scaling::kDynamic ? DynamicTheta(rope, max_model_len) : rope.theta;
  std::vector<double> frequencies(rope.rotary_dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(rope.rotary_dim);
    frequencies[i] = std::pow(theta, -exponent);
  }
  switch (rope.scaling) {
    case RopeSpec::Scaling::kNone:
    case RopeSpec::Scaling::kDynamic:
      break;
    case RopeSpec::Scaling::kLinear:
      for (double& frequency : frequencies) frequency /= rope.factor;
      break;
    case RopeSpec::Scaling::kLlama3:
      for (double& frequency : frequencies) frequency = Llama3Frequency(rope, frequency);
      break;
    case RopeSpec::Scaling::kYarn:
      ApplyYarn(rope, frequencies);
      break;
  }
  if (!rope.frequency_factors.empty()) {
    CHECK_EQ(rope.frequency_factors.size(), frequencies.size());
    for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= rope.frequency_factors[i];
  }
  return frequencies;
}

double AttentionFactor(const RopeSpec& rope) {
  if (rope.scaling != RopeSpec::Scaling::kYarn) return 1.0;
  if (rope.attention_factor) return *rope.attention_factor;
  // Both present and not zero: the ratio, which the softmax scale of such models completes.
  if (rope.mscale.value_or(0.0) != 0.0 && rope.mscale_all_dim.value_or(0.0) != 0.0) {
    return YarnMagnitude(rope.factor, *rope.mscale) /
           YarnMagnitude(rope.factor, *rope.mscale_all_dim);
  }
  return YarnMagnitude(rope.factor, 1.0);
}

double SoftmaxScaleFactor(const RopeSpec& rope) {
  if (rope.scaling != RopeSpec::Scaling::kYarn) return 1.0;
  const double magnitude = YarnMagnitude(rope.factor, rope.mscale_all_dim.value_or(0.0));
  return magnitude * magnitude;
}

std::vector<float> CosSinTable(const RopeSpec& rope, int64_t max_model_len) {
  const std::vector<double> frequencies = InverseFrequencies(rope, max_model_len);
  const double scale = AttentionFactor(rope);
  const int64_t half = rope.rotary_dim / 2;
  std::vector<float> table(max_model_len * rope.rotary_dim);
  for (int64_t position = 0; position < max_model_len; ++position) {
    float* row = table.data() + position * rope.rotary_dim;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * frequencies[i];
      row[i] = static_cast<float>(std::cos(angle) * scale);
      row[half + i] = static_cast<float>(std::sin(angle) * scale);
    }
  }
  return table;
}

}  // namespace heddle
