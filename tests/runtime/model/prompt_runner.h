// Runs prompts through the decoders of a world of rank threads.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gemm/linear.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/model/activation.h"

namespace heddle {

struct RunOptions {
  int num_ranks = 1;
  int num_threads = 1;  // a rank
  CpuStreamMode stream_mode = CpuStreamMode::kImmediate;
  bool use_cache = true;
  int64_t page_size = 16;
  int64_t chunk = 1 << 20;     // most tokens of one prompt in a step
  bool one_at_a_time = false;  // a prompt begins when the one before is done
  bool replay = false;         // steps run from a recording of the first; all must be of one shape
  int64_t max_model_len = 128;
  std::optional<DType> weight_dtype = std::nullopt;
  DType kv_cache_dtype = DType::kFloat32;
  ActivationPrecision precision = ActivationPrecision::kFloat32;
  LoadFormat load_format = LoadFormat::kAuto;
  std::function<void()> on_layer = nullptr;  // called by rank 0
  Tap tap = nullptr;                         // called by rank 0
};

using Prompts = std::vector<std::vector<int32_t>>;

// The logits [tokens, vocab] of each prompt. Pages are dealt at random from a pool full of NaN, and
// leave a sequence when they leave its window.
absl::StatusOr<std::vector<std::vector<float>>> PromptLogits(const std::string& model_path,
                                                             const Prompts& prompts,
                                                             const RunOptions& options);

}  // namespace heddle
