#include "runtime/cost_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/base/logging.h"
#include "parallel/kv_grid.h"
#include "runtime/checkpoint/declared_weights.h"
#include "runtime/model/tensor_names.h"

namespace heddle {
namespace {

constexpr double kLogSumExpBytes = 4;  // of a head's partial result

// Sums matrices of a checkpoint, as they are stored here, into groups.
class GroupBuilder {
 public:
  GroupBuilder(const WeightSource& weights, std::optional<DType> requested)
      : weights_(weights), requested_(requested) {}

  void Add(WeightGroup& group, absl::string_view name, int64_t copies = 1) const {
    const TensorInfo* info = weights_.Find(name);
    CHECK(info != nullptr) << "the checkpoint was opened without " << name;
    const DType dtype = StoredDType(info->dtype, requested_);
    double elements = static_cast<double>(copies);
    for (const int64_t size : info->shape) elements *= static_cast<double>(size);
    group += {.parameters = elements,
              .fp8_parameters = dtype == DType::kFloat8E4M3 ? elements : 0,
              .bytes = elements * static_cast<double>(BlockBytes(dtype)) /
                       static_cast<double>(BlockElements(dtype))};
  }

 private:
  const WeightSource& weights_;
  const std::optional<DType> requested_;
};

void AddAttention(const ModelSpec& spec, int64_t layer, const GroupBuilder& builder,
                  ModelCosts& costs) {
  const auto add = [&](WeightGroup& group, absl::string_view name) {
    builder.Add(group, LayerTensor(layer, absl::StrCat("self_attn.", name, ".weight")));
  };
  if (!spec.mla.has_value()) {
    add(costs.by_heads, "q_proj");
    add(costs.kv_projection, "k_proj");
    add(costs.kv_projection, "v_proj");
  } else {
    if (spec.mla->q_lora_rank == 0) {
      add(costs.by_heads, "q_proj");
    } else {
      add(costs.mirrored, "q_a_proj");
      add(costs.by_heads, "q_b_proj");
    }
    add(costs.kv_projection, "kv_a_proj_with_mqa");
    add(costs.by_heads, "kv_b_proj");
  }
  add(costs.by_heads, "o_proj");
}

void AddFfn(const ModelSpec& spec, int64_t layer, const GroupBuilder& builder, ModelCosts& costs) {
  if (!HasExperts(spec, layer)) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      builder.Add(costs.dense_ffn, LayerTensor(layer, absl::StrCat("mlp.", name, ".weight")));
    }
    return;
  }
  builder.Add(costs.mirrored, RouterTensor(spec, layer));
  for (const FfnMatrix matrix : {FfnMatrix::kGate, FfnMatrix::kUp, FfnMatrix::kDown}) {
    // All experts of a layer are of one type: the loader sees to it.
    builder.Add(costs.experts, ExpertTensor(spec, layer, 0, matrix), spec.moe->num_experts);
    if (spec.moe->shared_intermediate_size > 0) {
      builder.Add(costs.shared_experts, SharedExpertsTensor(layer, matrix));
    }
  }
}

// Seconds that a row takes to be multiplied by the group.
double RowSeconds(const WeightGroup& group, const DeviceFigures& device) {
  const double fp8_flops = device.fp8_flops > 0 ? device.fp8_flops : device.flops;
  return 2 *
         (group.fp8_parameters / fp8_flops +
          (group.parameters - group.fp8_parameters) / device.flops) /
         device.attained_flops_share;
}

// Of reading and computing together.
double RooflineSeconds(double reading, double computing, const DeviceFigures& device) {
  return device.overlaps_reads ? std::max(reading, computing) : reading + computing;
}

double ChosenExperts(const ModelSpec& spec) {  // by one token, of all
  if (!spec.moe.has_value()) return 0;
  return static_cast<double>(spec.moe->num_experts_per_token) /
         static_cast<double>(spec.moe->num_experts);
}

// The roofline of the linear layers of one rank.
class LinearTime {
 public:
  explicit LinearTime(const DeviceFigures& device) : device_(device) {}

  // `share` of the group is on this rank and meets `rows` tokens.
  void Add(const WeightGroup& group, double share, double rows) {
    bytes_ += share * group.bytes;
    Multiply(group, share * rows);
  }
  // `read` and `met` are the shares of the experts that this rank reads in a step, and that each of
  // `rows` tokens meets here.
  void AddExperts(const WeightGroup& experts, double read, double met, double rows) {
    bytes_ += read * experts.bytes;
    Multiply(experts, met * rows);
  }

  double bytes() const { return bytes_; }
  double operations() const { return operations_; }

  double reading() const { return bytes_ / device_.read_bytes_per_second; }
  double computing() const { return compute_; }
  double seconds() const { return RooflineSeconds(reading(), computing(), device_); }

 private:
  void Multiply(const WeightGroup& group, double rows) {
    operations_ += 2 * rows * group.parameters;
    compute_ += rows * RowSeconds(group, device_);
  }

  const DeviceFigures& device_;
  double bytes_ = 0;
  double operations_ = 0;
  double compute_ = 0;
};

// Every weight read by one of `num_ranks` ranks alone, and its products shared likewise.
LinearTime EvenLinear(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                      double batch) {
  LinearTime time(device);
  const double share = 1.0 / num_ranks;
  for (const WeightGroup* group : {&model.mirrored, &model.kv_projection, &model.by_heads,
                                   &model.dense_ffn, &model.shared_experts, &model.head}) {
    time.Add(*group, share, batch);
  }
  time.AddExperts(model.experts, share * model.TouchedExperts(batch),
                  share * ChosenExperts(model.spec), batch);
  return time;
}

// Bytes and operations of one layer's attention for one cached token of one sequence.
struct AttentionWork {
  double bytes = 0;
  double operations = 0;
};

AttentionWork WorkOf(const ModelCosts& model, double query_heads, double kv_heads) {
  const auto element = static_cast<double>(model.kv_element_bytes);
  if (model.spec.mla.has_value()) {
    const auto latent = static_cast<double>(model.spec.mla->kv_lora_rank);
    const auto rope = static_cast<double>(model.spec.mla->qk_rope_head_dim);
    return {.bytes = kv_heads * (latent + rope) * element,
            .operations = 2 * query_heads * (latent + rope + latent)};
  }
  const auto head_dim = static_cast<double>(model.spec.head_dim);
  return {.bytes = 2 * kv_heads * head_dim * element, .operations = 4 * query_heads * head_dim};
}

// Tokens that a sequence's query sees, over all layers.
double VisibleTokens(const ModelSpec& spec, int64_t context) {
  double tokens = 0;
  for (const int64_t window : spec.windows) {
    tokens += static_cast<double>(window > 0 ? std::min(window, context) : context);
  }
  return tokens;
}

double AttentionSeconds(const AttentionWork& work, double tokens, const DeviceFigures& device) {
  return tokens * RooflineSeconds(work.bytes / device.read_bytes_per_second,
                                  work.operations / (device.flops * device.attained_flops_share),
                                  device);
}

KvGrid GridOf(const ModelSpec& spec, const Placement& placement) {
  absl::StatusOr<KvGrid> grid = KvGrid::Create(spec.total_query_heads, spec.total_kv_heads,
                                               placement.num_ranks, placement.num_stripes);
  CHECK(grid.ok()) << grid.status();
  return *std::move(grid);
}

int64_t MostGroupHeads(const KvGrid& grid) {
  int64_t most = 0;
  for (int rank = 0; rank < grid.num_ranks(); ++rank) {
    most = std::max(most, grid.rank(rank).group_query_heads.size());
  }
  return most;
}

// Of a step's sequences, on the rank with the most.
double OwnSequences(const Placement& placement, int64_t batch) {
  return std::ceil(static_cast<double>(batch) / placement.num_ranks);
}

double TensorParallelAttention(const ModelCosts& model, const DeviceFigures& device,
                               const KvGrid& grid, double tokens) {
  double seconds = 0;
  for (int rank = 0; rank < grid.num_ranks(); ++rank) {
    const KvGridRank& heads = grid.rank(rank);
    const AttentionWork work = WorkOf(model, static_cast<double>(heads.group_query_heads.size()),
                                      static_cast<double>(heads.kv_heads.size()));
    seconds = std::max(seconds, AttentionSeconds(work, tokens / grid.num_stripes(), device));
  }
  return seconds;
}

double CollectiveSeconds(const CollectiveSpeed& speed, double bytes) {
  return speed.latency_seconds + bytes / speed.bytes_per_second;
}

double TensorParallelCommunication(const ModelCosts& model, const DeviceFigures& device,
                                   const Placement& placement, double batch) {
  if (placement.num_ranks == 1) return 0;
  const LayerTraffic traffic = TrafficOf(model, device, placement);
  double layer = 2 * CollectiveSeconds(device.all_reduce, traffic.all_reduces / 2 * batch);
  if (placement.num_stripes > 1) {
    layer += CollectiveSeconds(device.all_gather, traffic.query_gather * batch) +
             CollectiveSeconds(device.all_to_all, traffic.partials * batch);
  }
  return static_cast<double>(model.spec.num_layers) * layer;
}

double DpCommunication(const ModelCosts& model, const DeviceFigures& device,
                       const Placement& placement, double batch, bool all_to_all) {
  if (placement.num_ranks == 1) return 0;
  const LayerTraffic traffic = TrafficOf(model, device, placement);
  const double gathered = CollectiveSeconds(device.all_gather, traffic.hidden_gather * batch) +
                          CollectiveSeconds(device.reduce_scatter, traffic.hidden_scatter * batch);
  const double routed = 2 * CollectiveSeconds(device.all_to_all, traffic.experts / 2 * batch);
  double seconds = 0;
  for (int64_t layer = 0; layer < model.spec.num_layers; ++layer) {
    seconds += all_to_all && HasExperts(model.spec, layer) ? routed : gathered;
  }
  return seconds;
}

// Of one rank.
LinearTime TensorParallelLinear(const ModelCosts& model, const DeviceFigures& device,
                                const KvGrid& grid, double rows) {
  const double share = 1.0 / grid.num_ranks();
  double kv_copies = 0;
  for (int rank = 0; rank < grid.num_ranks(); ++rank) {
    kv_copies += static_cast<double>(grid.rank(rank).kv_heads.size());
  }
  LinearTime linear(device);
  linear.Add(model.mirrored, 1, rows);
  // Columns of the FFN make up for uneven heads, so that the mean is what each rank reads.
  linear.Add(model.kv_projection,
             share * kv_copies / static_cast<double>(model.spec.total_kv_heads), rows);
  for (const WeightGroup* group :
       {&model.by_heads, &model.dense_ffn, &model.shared_experts, &model.head}) {
    linear.Add(*group, share, rows);
  }
  linear.AddExperts(model.experts, share * model.TouchedExperts(rows),
                    share * ChosenExperts(model.spec), rows);
  return linear;
}

StepTime TensorParallelStep(const ModelCosts& model, const DeviceFigures& device,
                            const Placement& placement, int64_t batch, int64_t context) {
  const KvGrid grid = GridOf(model.spec, placement);
  const auto rows = static_cast<double>(batch);
  return {.linear = TensorParallelLinear(model, device, grid, rows).seconds(),
          .attention = TensorParallelAttention(model, device, grid,
                                               rows * VisibleTokens(model.spec, context)),
          .communication = TensorParallelCommunication(model, device, placement, rows),
          .all_to_all = false};
}

// Of one rank.
LinearTime DpLinear(const ModelCosts& model, const DeviceFigures& device,
                    const Placement& placement, int64_t batch, bool all_to_all) {
  const auto rows = static_cast<double>(batch);
  const double own = OwnSequences(placement, batch);
  const double share = 1.0 / placement.num_ranks;
  LinearTime linear(device);
  for (const WeightGroup* group : {&model.mirrored, &model.kv_projection, &model.by_heads}) {
    linear.Add(*group, 1, own);
  }
  linear.Add(model.dense_ffn, share, rows);
  linear.Add(model.head, share, rows);
  // A token that is sent to its experts alone meets the shared ones at home.
  linear.Add(model.shared_experts, all_to_all ? 1 : share, all_to_all ? own : rows);
  linear.AddExperts(model.experts, share * model.TouchedExperts(rows),
                    share * ChosenExperts(model.spec), rows);
  return linear;
}

StepTime DpStep(const ModelCosts& model, const DeviceFigures& device, const Placement& placement,
                int64_t batch, int64_t context, bool all_to_all) {
  const double own = OwnSequences(placement, batch);
  const AttentionWork work = WorkOf(model, static_cast<double>(model.spec.total_query_heads),
                                    static_cast<double>(model.spec.total_kv_heads));
  return {.linear = DpLinear(model, device, placement, batch, all_to_all).seconds(),
          .attention = AttentionSeconds(work, own * VisibleTokens(model.spec, context), device),
          .communication =
              DpCommunication(model, device, placement, static_cast<double>(batch), all_to_all),
          .all_to_all = all_to_all};
}

// The first of [1, last] for which `holds`, which does so for all above it too; none if not there.
std::optional<int64_t> FirstThat(int64_t last, absl::FunctionRef<bool(int64_t)> holds) {
  if (!holds(last)) return std::nullopt;
  int64_t first = 1;
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (holds(middle)) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

}  // namespace

WeightGroup& WeightGroup::operator+=(const WeightGroup& other) {
  parameters += other.parameters;
  fp8_parameters += other.fp8_parameters;
  bytes += other.bytes;
  return *this;
}

double ModelCosts::TouchedExperts(double batch) const {
  return 1 - std::pow(1 - ChosenExperts(spec), batch);
}

double ModelCosts::ActiveParameters() const {
  return mirrored.parameters + kv_projection.parameters + by_heads.parameters +
         dense_ffn.parameters + shared_experts.parameters + head.parameters +
         ChosenExperts(spec) * experts.parameters;
}

double ModelCosts::ReadBytes(double batch) const {
  return mirrored.bytes + kv_projection.bytes + by_heads.bytes + dense_ffn.bytes +
         shared_experts.bytes + head.bytes + TouchedExperts(batch) * experts.bytes;
}

ModelCosts CostsOf(const ModelSpec& spec, const WeightSource& weights, DType kv_cache_dtype,
                   std::optional<DType> weight_dtype) {
  ModelCosts costs;
  costs.spec = spec;
  costs.kv_element_bytes = BlockBytes(kv_cache_dtype);
  const GroupBuilder builder(weights, weight_dtype);
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    AddAttention(spec, layer, builder, costs);
    AddFfn(spec, layer, builder, costs);
  }
  if (spec.tie_word_embeddings) {
    builder.Add(costs.head, kEmbeddingTensor);
  } else {
    builder.Add(costs.head, kHeadTensor);
    builder.Add(costs.embedding, kEmbeddingTensor);
  }
  for (const TensorInfo& tensor : weights.tensors()) {
    if (tensor.shape.size() != 1) continue;
    const auto size = static_cast<double>(tensor.shape[0]);
    costs.mirrored += {.parameters = size, .fp8_parameters = 0, .bytes = size * sizeof(float)};
  }
  for (const WeightGroup* group :
       {&costs.mirrored, &costs.kv_projection, &costs.by_heads, &costs.dense_ffn,
        &costs.shared_experts, &costs.experts, &costs.head, &costs.embedding}) {
    costs.parameters += group->parameters;
  }
  return costs;
}

KvBytesByKind KvBytesOf(const ModelCosts& model) {
  const ModelSpec& spec = model.spec;
  const int64_t heads = spec.total_query_heads;
  const int64_t element = spec.num_layers * model.kv_element_bytes;
  KvBytesByKind bytes;
  int64_t head_dim = spec.head_dim;
  if (spec.mla.has_value()) {
    bytes.own = KvBytesByKind::Kind::kMla;
    head_dim = spec.mla->v_head_dim;
    bytes.mla = element * (spec.mla->kv_lora_rank + spec.mla->qk_rope_head_dim);
  } else {
    bytes.own = spec.total_kv_heads == heads ? KvBytesByKind::Kind::kMha
                : spec.total_kv_heads == 1   ? KvBytesByKind::Kind::kMqa
                                             : KvBytesByKind::Kind::kGqa;
    bytes.mla = element * 9 * head_dim / 2;
  }
  bytes.gqa_heads = spec.total_kv_heads;
  if (bytes.own != KvBytesByKind::Kind::kGqa) {
    bytes.gqa_heads = std::min<int64_t>(heads, 8);
    while (heads % bytes.gqa_heads != 0) --bytes.gqa_heads;
  }
  bytes.mha = element * 2 * heads * head_dim;
  bytes.gqa = element * 2 * bytes.gqa_heads * head_dim;
  bytes.mqa = element * 2 * head_dim;
  return bytes;
}

HeadThreshold HeadsToBeComputeBound(const ModelCosts& model, const DeviceFigures& device) {
  const double balance = device.flops / device.read_bytes_per_second;
  const AttentionWork one = WorkOf(model, 1, 1);
  return {.simple = balance / 2, .exact = balance * one.bytes / one.operations};
}

int64_t HeadsPerRead(const ModelSpec& spec, const Placement& placement) {
  if (placement.dp_attention) return spec.total_query_heads / spec.total_kv_heads;
  const KvGrid grid = GridOf(spec, placement);
  int64_t most = 0;
  for (int rank = 0; rank < grid.num_ranks(); ++rank) {
    const KvGridRank& heads = grid.rank(rank);
    if (heads.kv_heads.empty()) continue;
    const int64_t kv_heads = heads.kv_heads.size();
    most = std::max(most, (heads.group_query_heads.size() + kv_heads - 1) / kv_heads);
  }
  return most;
}

LayerTraffic TrafficOf(const ModelCosts& model, const DeviceFigures& device,
                       const Placement& placement) {
  const ModelSpec& spec = model.spec;
  const auto element = static_cast<double>(device.activation_bytes);
  const auto hidden = static_cast<double>(spec.hidden_size);
  const double ranks = placement.num_ranks;
  const double from_others = (ranks - 1) / ranks;
  LayerTraffic traffic;
  if (placement.dp_attention) {
    traffic.hidden_gather = traffic.hidden_scatter = from_others * hidden * element;
    if (spec.moe.has_value() && placement.expert_parallel) {
      // A copy to each other rank that holds a chosen expert, and a summand back.
      const auto chosen = static_cast<double>(spec.moe->num_experts_per_token);
      const double other_ranks = (ranks - 1) * (1 - std::pow(from_others, chosen));
      traffic.experts = other_ranks / ranks * hidden * 2 * element;
    }
    return traffic;
  }
  traffic.all_reduces = 2 * 2 * from_others * hidden * element;
  if (placement.num_stripes > 1) {
    const double stripes = placement.num_stripes;
    const double heads_of_others =
        (stripes - 1) / stripes * static_cast<double>(MostGroupHeads(GridOf(spec, placement)));
    const int64_t out_dim = spec.mla.has_value() ? spec.mla->kv_lora_rank : spec.head_dim;
    const int64_t query_dim = spec.mla.has_value() ? out_dim + spec.mla->qk_rope_head_dim : out_dim;
    traffic.query_gather = heads_of_others * static_cast<double>(query_dim) * element;
    traffic.partials = heads_of_others * (static_cast<double>(out_dim) * element + kLogSumExpBytes);
  }
  return traffic;
}

StepTime PredictStep(const ModelCosts& model, const DeviceFigures& device,
                     const Placement& placement, int64_t batch, int64_t context) {
  if (!placement.dp_attention) {
    return TensorParallelStep(model, device, placement, batch, context);
  }
  const StepTime gathered = DpStep(model, device, placement, batch, context, /*all_to_all=*/false);
  if (!model.spec.moe.has_value() || !placement.expert_parallel) return gathered;
  const StepTime routed = DpStep(model, device, placement, batch, context, /*all_to_all=*/true);
  return routed.total() < gathered.total() ? routed : gathered;
}

StepWork WorkOfStep(const ModelCosts& model, const DeviceFigures& device,
                    const Placement& placement, int64_t batch, int64_t context) {
  const double visible = VisibleTokens(model.spec, context);
  if (placement.dp_attention) {
    const bool all_to_all = PredictStep(model, device, placement, batch, context).all_to_all;
    const LinearTime linear = DpLinear(model, device, placement, batch, all_to_all);
    const AttentionWork one = WorkOf(model, static_cast<double>(model.spec.total_query_heads),
                                     static_cast<double>(model.spec.total_kv_heads));
    const double own = OwnSequences(placement, batch) * visible;
    return {.weight_bytes = linear.bytes(),
            .kv_bytes = own * one.bytes,
            .kv_bytes_of_all = static_cast<double>(batch) * visible * one.bytes,
            .operations = linear.operations() + own * one.operations};
  }
  const KvGrid grid = GridOf(model.spec, placement);
  const auto rows = static_cast<double>(batch);
  const LinearTime linear = TensorParallelLinear(model, device, grid, rows);
  const double stored = rows * visible / grid.num_stripes();
  StepWork work = {.weight_bytes = linear.bytes()};
  double attention_operations = 0;
  for (int rank = 0; rank < grid.num_ranks(); ++rank) {
    const KvGridRank& heads = grid.rank(rank);
    const AttentionWork one = WorkOf(model, static_cast<double>(heads.group_query_heads.size()),
                                     static_cast<double>(heads.kv_heads.size()));
    work.kv_bytes = std::max(work.kv_bytes, stored * one.bytes);
    work.kv_bytes_of_all += stored * one.bytes;
    attention_operations = std::max(attention_operations, stored * one.operations);
  }
  work.operations = linear.operations() + attention_operations;
  return work;
}

bool ExchangesExperts(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                      int64_t batch) {
  // Attention takes as long either way, whatever the context.
  return PredictStep(model, device,
                     {.num_ranks = num_ranks,
                      .num_stripes = 1,
                      .dp_attention = true,
                      .expert_parallel = true},
                     batch, /*context=*/1)
      .all_to_all;
}

StepTime CeilingStep(const ModelCosts& model, const DeviceFigures& device, int num_ranks,
                     bool kv_once, int64_t batch, int64_t context) {
  const auto rows = static_cast<double>(batch);
  const double share = 1.0 / num_ranks;
  AttentionWork work = WorkOf(model, static_cast<double>(model.spec.total_query_heads),
                              static_cast<double>(model.spec.total_kv_heads));
  if (kv_once) work.bytes *= share;
  work.operations *= share;
  return {.linear = EvenLinear(model, device, num_ranks, rows).seconds(),
          .attention = AttentionSeconds(work, rows * VisibleTokens(model.spec, context), device),
          .communication = 0,
          .all_to_all = false};
}

int64_t ComputeBoundBatch(const ModelCosts& model, const DeviceFigures& device) {
  // What is read stops growing once every expert is touched, what is computed does not.
  return FirstThat(kLargestBatch,
                   [&](int64_t batch) {
                     const LinearTime time =
                         EvenLinear(model, device, 1, static_cast<double>(batch));
                     return time.computing() >= time.reading();
                   })
      .value_or(kLargestBatch);
}

std::optional<int64_t> BreakEvenContext(const ModelCosts& model, const DeviceFigures& device,
                                        const Placement& placement, const Placement& other,
                                        int64_t batch) {
  return FirstThat(kLongestContext, [&](int64_t context) {
    return PredictStep(model, device, placement, batch, context).total() <
           PredictStep(model, device, other, batch, context).total();
  });
}

std::optional<int64_t> AttentionBoundContext(const ModelCosts& model, const DeviceFigures& device,
                                             const Placement& placement, int64_t batch) {
  return FirstThat(kLongestContext, [&](int64_t context) {
    const StepTime time = PredictStep(model, device, placement, batch, context);
    return time.attention >= time.linear;
  });
}

int64_t CapacityTokens(const ShardLayout& layout, double memory_bytes) {
  double pages = std::numeric_limits<double>::infinity();
  int64_t page_size = 0;
  for (const RankLayout& rank : layout.ranks) {
    const double room = memory_bytes - static_cast<double>(rank.weight_bytes);
    if (room < 0) return 0;
    if (rank.kv.bytes_per_page() == 0) continue;
    page_size = rank.kv.page_size();
    pages = std::min(pages, std::floor(room / static_cast<double>(rank.kv.bytes_per_page())));
  }
  return page_size == 0 ? 0 : static_cast<int64_t>(pages) * page_size * layout.grid.num_stripes();
}

}  // namespace heddle
