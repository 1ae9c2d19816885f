// How a model's rotary embedding turns positions into angles.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace heddle {

struct RopeSpec {
  // kLinear divides every frequency; kDynamic enlarges theta with the length (NTK-aware), kYarn
  // blends by wavelength and scales the cosines (Peng et al. 2023, arXiv:2309.00071), kLlama3
  // blends by wavelength alone.
  enum class Scaling { kNone, kLinear, kDynamic, kLlama3, kYarn };

  double theta = 10000.0;
  int64_t rotary_dim = 0;    // even; the elements of a head that are rotated
  bool interleaved = false;  // pairs (2i, 2i + 1), else (i, i + rotary_dim / 2)

  Scaling scaling = Scaling::kNone;
  double factor = 1.0;
  // The length the model was trained at before scaling (kDynamic, kLlama3, kYarn).
  int64_t original_max_position_embeddings = 0;
  // kLlama3: wavelengths above original / low are divided, below original / high are kept.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // kYarn: rotations over the original length that bound the blended dimensions.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;                    // bounds rounded outwards to whole dimensions
  std::optional<double> attention_factor;  // given by the checkpoint; else from factor and mscale
  std::optional<double> mscale;
  std::optional<double> mscale_all_dim;

  // Divisors of the frequencies, [rotary_dim / 2] or empty (GGUF's rope_freqs.weight).
  std::vector<float> frequency_factors;
};

// Radians a position, [rotary_dim / 2]. `max_model_len` is the configured maximum length, at which
// kDynamic is frozen: a sequence's angles do not depend on how long it has grown.
std::vector<double> InverseFrequencies(const RopeSpec& rope, int64_t max_model_len);

// What cosines and sines are multiplied by; 1 except under kYarn.
double AttentionFactor(const RopeSpec& rope);

// What DeepSeek's models multiply the softmax's scale by under kYarn with mscale_all_dim:
// (0.1 * mscale_all_dim * ln(factor) + 1)^2, for what the cosines' ratio took away or never had
// (DeepSeek's modeling_deepseek.py). 1 else.
double SoftmaxScaleFactor(const RopeSpec& rope);

// The table that kernels/rope reads, [max_model_len, rotary_dim]: a row holds rotary_dim / 2
// cosines, then as many sines, rounded once from float64 and scaled by the attention factor.
std::vector<float> CosSinTable(const RopeSpec& rope, int64_t max_model_len);

}  // namespace heddle
