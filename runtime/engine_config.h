// What an engine is asked to be; the command line's common flags, already parsed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/base/backend.h"
#include "kernels/base/dtype.h"
#include "kernels/cpu/cpu_backend.h"
#include "runtime/checkpoint/checkpoint.h"

namespace heddle {

// The same on every rank. A zero or empty optional means "choose for me"; the engine logs what it
// chose.
struct EngineConfig {
  std::string model;  // directory, .gguf or, for dummy weights, a config.json
  LoadFormat load_format = LoadFormat::kAuto;
  std::optional<DType> dtype;  // how plain weights are stored; as in the file if unset
  DeviceKind device = DeviceKind::kCpu;

  int64_t max_model_len = 0;           // the model's own limit if 0
  int64_t max_num_seqs = 64;           // rows of the persistent batch
  int64_t max_num_batched_tokens = 0;  // 0: 2,048, at least max_num_seqs
  int64_t prefill_chunk = 0;           // most tokens of one prompt in one step; 0: the budget above
  bool decode_prompts = false;         // compute prompts as generated tokens are, one by one

  int64_t block_size = 0;  // tokens a page; 0: DefaultPageSize
  // Per rank. If none of the three is set: 4 GiB, or one longest sequence if that takes more
  // (memory_share.h).
  std::optional<int64_t> num_kv_pages;           // exactly
  std::optional<int64_t> kv_cache_memory_bytes;  // at most
  std::optional<double> memory_utilization;      // of the rank's share of free memory
  std::optional<DType> kv_cache_dtype;           // float32 on CPU if unset
  bool int8_activations = true;                  // block-quantised weights meet int8 activations
  // Stripes of the cache (decode context parallel), a divisor of the number of ranks. If unset,
  // what suits max_num_seqs sequences of expected_context_len tokens (0: half of the longest) best:
  // see auto_placement.h.
  std::optional<int64_t> num_stripes;
  int64_t expected_context_len = 0;
  bool enable_expert_parallel = false;  // deal whole experts, not columns of each
  // MLA: each rank attends, with all heads, for whole sequences of its own. Needs a cache.
  bool enable_dp_attention = false;
  // With both: tokens travel to their experts alone, or all are gathered on every rank. As
  // ExchangesExperts (cost_model.h) says if unset.
  std::optional<bool> exchange_experts;
  bool enable_prefix_caching = true;
  bool use_kv_cache = true;

  uint64_t seed = 0;
  int num_threads = 0;  // of this rank; 0: allowed CPUs / ranks of the node
  CpuStreamMode stream_mode = CpuStreamMode::kImmediate;
  // Ledger integrity after each step, page-table digests on every rank. For tests.
  bool verify_every_step = false;
  // Most tokens that MLA expands at once, a multiple of kMlaPieceAlignment; 0: what takes little
  // memory. For tests.
  int64_t mla_piece_tokens = 0;
};

}  // namespace heddle
