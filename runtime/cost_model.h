// What a model costs: bytes kept, bytes read, operations done and bytes sent in a decode step, and
// how long that takes at best. Formulas are here, the figures of devices in device_table.h.
//
// A step's time is the sum of three parts: linear layers and attention, each the longer of reading
// and computing (a roofline; on CPUs, which do one after the other, their sum), and the
// collectives, each its latency and its bytes over the link. Nothing overlaps, routing to experts
// is uniform, and sampling and launching are free.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/base/dtype.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/device_table.h"
#include "runtime/model/model_spec.h"
#include "runtime/shard_layout.h"

namespace heddle {

// Bounds under which no product of the two overflows.
inline constexpr int64_t kLongestContext = int64_t{1} << 30;
inline constexpr int64_t kLargestBatch = int64_t{1} << 30;

// Matrices that ranks share in the same way.
struct WeightGroup {
  double parameters = 0;
  double fp8_parameters = 0;  // those of them stored as float8
  double bytes = 0;           // as stored

  WeightGroup& operator+=(const WeightGroup& other);
};

// A model as the formulas see it.
struct ModelCosts {
  ModelSpec spec;
  int64_t kv_element_bytes = 2;
  double parameters = 0;  // all there are

  WeightGroup mirrored;       // router, norms, MLA's projection to the queries' latent
  WeightGroup kv_projection;  // with the KV heads: keys and values, or MLA's latent
  WeightGroup by_heads;       // with the query heads: all else of attention
  WeightGroup dense_ffn;
  WeightGroup shared_experts;
  WeightGroup experts;    // routed ones, of all layers
  WeightGroup head;       // of a tied model the embedding
  WeightGroup embedding;  // of one that is not tied

  // Of the routed experts, those that at least one of `batch` tokens chose:
  // 1 - (1 - k/E)^batch, if each is as likely as any.
  double TouchedExperts(double batch) const;
  // What one token is multiplied by; an embedding is looked up, not read.
  double ActiveParameters() const;
  // What one step of `batch` tokens reads of the weights, over all ranks.
  double ReadBytes(double batch) const;
};

ModelCosts CostsOf(const ModelSpec& spec, const WeightSource& weights, DType kv_cache_dtype,
                   std::optional<DType> weight_dtype = std::nullopt);

// Bytes of keys and values a token over all layers, on one rank that holds all heads, for each kind
// of attention with the model's own query heads (DeepSeek-V2, table 1, arXiv:2405.04434). What the
// model does not have itself is sized as there: heads of v_head_dim for a model with latents, a
// latent of 4 heads' width and half a head of RoPE for one without, and 8 KV heads for GQA (or the
// largest count below that divides the query heads).
struct KvBytesByKind {
  enum class Kind { kMha, kGqa, kMqa, kMla };

  Kind own = Kind::kMha;
  int64_t gqa_heads = 0;
  int64_t mha = 0, gqa = 0, mqa = 0, mla = 0;
};
KvBytesByKind KvBytesOf(const ModelCosts& model);

// How many query heads must share one read of a token's latent, or of a key and a value, for
// attention to be bound by arithmetic rather than by reading.
struct HeadThreshold {
  // Peak / (2 x bandwidth): two operations an element each for scores and sums, all elements of a
  // latent in bfloat16 taking part in both.
  double simple = 0;
  // With the widths and the element of this cache; of an MLA latent only kv_lora_rank elements take
  // part in the sums: 2 x (kv_lora_rank + qk_rope + kv_lora_rank) operations a head.
  double exact = 0;
};
HeadThreshold HeadsToBeComputeBound(const ModelCosts& model, const DeviceFigures& device);

// How `num_ranks` ranks hold the cache.
struct Placement {
  int num_ranks = 1;
  int num_stripes = 1;        // divides num_ranks
  bool dp_attention = false;  // whole sequences dealt over ranks, num_stripes then being 1
  // Whole experts dealt over ranks: only then can tokens of dp_attention travel to theirs alone.
  bool expert_parallel = false;
};

// The query heads that one read of a cached token serves on the rank with the most.
int64_t HeadsPerRead(const ModelSpec& spec, const Placement& placement);

// Bytes that a rank receives for each layer and each token of the step's whole batch.
struct LayerTraffic {
  double all_reduces = 0;     // two: a ring passes each byte 2 (N-1)/N times
  double query_gather = 0;    // striped: the stripe group's queries to each of its ranks
  double partials = 0;        // striped: outputs and log-sum-exps to the ranks that merge them
  double hidden_gather = 0;   // data-parallel attention: all tokens to all ranks ...
  double hidden_scatter = 0;  // ... and the sums back
  double experts = 0;         // data-parallel attention instead: tokens to their experts and back
};
LayerTraffic TrafficOf(const ModelCosts& model, const DeviceFigures& device,
                       const Placement& placement);

// Seconds.
struct StepTime {
  double linear = 0;
  double attention = 0;
  double communication = 0;
  bool all_to_all = false;  // data-parallel attention: tokens go to their experts alone

  double total() const { return linear + attention + communication; }
};

// Of one decode step of `batch` sequences that `context` tokens each are cached of.
StepTime PredictStep(const ModelCosts& model, const DeviceFigures& device,
                     const Placement& placement, int64_t batch, int64_t context);

// What the busiest rank reads and computes in that step: what its time is predicted from.
struct StepWork {
  double weight_bytes = 0;     // of experts, those that some token is expected to choose
  double kv_bytes = 0;         // of the cache
  double kv_bytes_of_all = 0;  // the same, of all ranks together
  double operations = 0;       // a multiply-add is two
};
StepWork WorkOfStep(const ModelCosts& model, const DeviceFigures& device,
                    const Placement& placement, int64_t batch, int64_t context);

// Whether a job with data-parallel attention and whole experts dealt should let its tokens travel
// to their experts alone, rather than gather them all on every rank: what a step of `batch` is
// predicted to be faster with. Pure.
bool ExchangesExperts(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                      int64_t batch);

// The time if nothing had to be sent, no weight were held twice and all were dealt evenly: what no
// placement beats. `kv_once`: a token is read by one rank; else by all, as MLA without stripes
// does.
StepTime CeilingStep(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                     bool kv_once, int64_t batch, int64_t context);

// The smallest batch, up to kLargestBatch, at which the linear layers of a step take longer to
// compute than to read.
int64_t ComputeBoundBatch(const ModelCosts& model, const DeviceFigures& device);

// The smallest context from which a step of `batch` takes less time at `placement` than at `other`;
// none within kLongestContext.
std::optional<int64_t> BreakEvenContext(const ModelCosts& model, const DeviceFigures& device,
                                        const Placement& placement, const Placement& other,
                                        int64_t batch);

// The smallest context from which attention takes at least as long as the linear layers of a step;
// none within kLongestContext.
std::optional<int64_t> AttentionBoundContext(const ModelCosts& model, const DeviceFigures& device,
                                             const Placement& placement, int64_t batch);

// Tokens that fit beside the weights in `memory_bytes` a rank, in whole pages over all stripes; 0
// if the weights alone do not fit.
int64_t CapacityTokens(const ShardLayout& layout, double memory_bytes);

}  // namespace heddle
