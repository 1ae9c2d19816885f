#include "launch/commands/plan_report.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/dtype.h"
#include "launch/commands/layout_flags.h"
#include "nlohmann/json.hpp"

namespace heddle {
namespace {

using Json = nlohmann::ordered_json;
using Kind = KvBytesByKind::Kind;

// "1,048,576"
std::string Grouped(double value) {
  std::string digits = absl::StrFormat("%.0f", value);
  for (auto place = static_cast<int64_t>(digits.size()) - 3; place > 0; place -= 3) {
    digits.insert(static_cast<size_t>(place), ",");
  }
  return digits;
}
std::string Grouped(int64_t value) { return Grouped(static_cast<double>(value)); }

// Three digits, or all before the point.
std::string Rounded(double value) {
  return value < 100 ? absl::StrFormat("%.3g", value) : Grouped(value);
}

// "989 TFLOP/s"
std::string FlopsText(double flops) {
  return flops < 1e12 ? absl::StrFormat("%.1f GFLOP/s", flops / 1e9)
                      : absl::StrFormat("%.0f TFLOP/s", flops / 1e12);
}

struct KindBytes {
  Kind kind;
  std::string name;
  int64_t bytes;
};

std::vector<KindBytes> BytesOfKinds(const KvBytesByKind& kv) {
  return {{Kind::kMha, "MHA", kv.mha},
          {Kind::kGqa, absl::StrFormat("GQA (%d heads)", kv.gqa_heads), kv.gqa},
          {Kind::kMqa, "MQA", kv.mqa},
          {Kind::kMla, "MLA", kv.mla}};
}

double Rate(const StepTime& time, int64_t batch) {
  return static_cast<double>(batch) / time.total();
}

StepTime TimeOf(const Plan& plan, const PlacementPlan& one, int64_t batch, int64_t context) {
  return PredictStep(plan.model, plan.device, one.placement, batch, context);
}

// With each token of the cache read by one rank, which a placement can reach.
StepTime Ceiling(const Plan& plan, int64_t batch, int64_t context) {
  return CeilingStep(plan.model, plan.device, plan.layout.num_ranks, /*kv_once=*/true, batch,
                     context);
}

bool Fits(const PlacementPlan& one, int64_t batch, int64_t context) {
  return one.capacity_tokens / context >= batch;
}

bool AttentionIsComputeBound(const Plan& plan, const PlacementPlan& one) {
  return static_cast<double>(HeadsPerRead(plan.model.spec, one.placement)) >
         HeadsToBeComputeBound(plan.model, plan.device).exact;
}

double TotalTraffic(const LayerTraffic& traffic, bool all_to_all) {
  return traffic.all_reduces + traffic.query_gather + traffic.partials +
         (all_to_all ? traffic.experts : traffic.hidden_gather + traffic.hidden_scatter);
}

const PlacementPlan* DpAttentionOf(const Plan& plan) {
  const PlacementPlan& last = plan.placements.back();
  return last.placement.dp_attention ? &last : nullptr;
}

std::string RecommendedCommand(const Plan& plan) {
  const int num_ranks = plan.layout.num_ranks;
  std::string command = num_ranks > 1 ? absl::StrCat("mpirun -np ", num_ranks, " ") : "";
  absl::StrAppend(&command, "heddle bench throughput --model ", plan.model_path);
  if (plan.bare_config) absl::StrAppend(&command, " --load-format dummy");
  absl::StrAppend(&command, " --max-num-seqs ", plan.load.max_num_seqs, " --expected-context-len ",
                  plan.load.context_len);
  if (plan.layout.dp_attention) {
    absl::StrAppend(&command, " --enable-dp-attention");
  } else {
    absl::StrAppend(&command, " --decode-context-parallel-size ", plan.choice.num_stripes);
  }
  if (plan.layout.expert_parallel) absl::StrAppend(&command, " --enable-expert-parallel");
  return command;
}

std::string BatchAdvice(const Plan& plan) {
  const int64_t held = plan.chosen.capacity_tokens / plan.load.context_len;
  std::string text =
      absl::StrCat("batch size: the linear layers turn compute-bound at ",
                   Grouped(plan.compute_bound_batch), " sequences, the cache (", plan.chosen.name,
                   ") holds ", Grouped(held), " of ", Grouped(plan.load.context_len), " tokens: ");
  if (held < plan.compute_bound_batch) {
    return absl::StrCat(text, "as many as fit are best, memory bounds the batch");
  }
  return absl::StrCat(text, "beyond ", Grouped(plan.compute_bound_batch),
                      " a step takes longer and hardly more tokens come of it");
}

// What a latent of half the width would change.
std::string LatentAdvice(const Plan& plan) {
  const int64_t batch = plan.load.max_num_seqs, context = plan.load.context_len;
  const StepTime time = TimeOf(plan, plan.chosen, batch, context);
  ModelCosts narrow = plan.model;
  MlaSpec& mla = *narrow.spec.mla;
  const int64_t width = mla.kv_lora_rank;
  mla.kv_lora_rank = std::max<int64_t>(width / 2, 1);
  const StepTime narrow_time =
      PredictStep(narrow, plan.device, plan.chosen.placement, batch, context);
  return absl::StrFormat(
      "latent width: attention takes %.0f %% of the step at %s sequences of %s tokens and is bound "
      "by %s; a latent of %d instead of %d would decode %.2f times as fast and hold %.2f times the "
      "tokens",
      100 * time.attention / time.total(), Grouped(batch), Grouped(context),
      AttentionIsComputeBound(plan, plan.chosen) ? "arithmetic" : "reading", mla.kv_lora_rank,
      width, time.total() / narrow_time.total(),
      static_cast<double>(width + mla.qk_rope_head_dim) /
          static_cast<double>(mla.kv_lora_rank + mla.qk_rope_head_dim));
}

std::vector<std::string> Advice(const Plan& plan) {
  if (!plan.does_not_fit.empty()) return {plan.does_not_fit};
  std::vector<std::string> advice = {BatchAdvice(plan)};
  if (plan.model.spec.mla.has_value()) advice.push_back(LatentAdvice(plan));
  if (plan.layout.num_ranks > 1) {
    advice.push_back(absl::StrCat("placement: ", plan.choice.why));
  }
  const PlacementPlan* dp = DpAttentionOf(plan);
  if (dp == nullptr || !Fits(*dp, plan.load.max_num_seqs, plan.load.context_len)) return advice;
  const double ratio =
      TimeOf(plan, plan.chosen, plan.load.max_num_seqs, plan.load.context_len).total() /
      TimeOf(plan, *dp, plan.load.max_num_seqs, plan.load.context_len).total();
  if (ratio > 1) {
    advice.push_back(absl::StrFormat(
        "placement: --enable-dp-attention instead is predicted to decode %.2f times as fast",
        ratio));
  }
  return advice;
}

Json TrafficJson(const LayerTraffic& traffic) {
  return {{"all_reduces", traffic.all_reduces},
          {"query_gather", traffic.query_gather},
          {"partials", traffic.partials},
          {"hidden_gather", traffic.hidden_gather},
          {"hidden_scatter", traffic.hidden_scatter},
          {"experts", traffic.experts}};
}

Json PlacementJson(const Plan& plan, const PlacementPlan& one) {
  Json steps = Json::array();
  for (const int64_t context : plan.context_lens) {
    for (const int64_t batch : plan.batch_sizes) {
      const StepTime time = TimeOf(plan, one, batch, context);
      steps.push_back({{"batch_size", batch},
                       {"context_len", context},
                       {"fits", Fits(one, batch, context)},
                       {"linear_seconds", time.linear},
                       {"attention_seconds", time.attention},
                       {"communication_seconds", time.communication},
                       {"all_to_all", time.all_to_all},
                       {"tokens_per_second", Rate(time, batch)}});
    }
  }
  return {{"name", one.name},
          {"stripes", one.placement.num_stripes},
          {"dp_attention", one.placement.dp_attention},
          {"weight_bytes", one.weight_bytes},
          {"capacity_tokens", one.capacity_tokens},
          {"heads_per_read", HeadsPerRead(plan.model.spec, one.placement)},
          {"attention_bound_by", AttentionIsComputeBound(plan, one) ? "arithmetic" : "reading"},
          {"received_bytes_per_token_and_layer",
           TrafficJson(TrafficOf(plan.model, plan.device, one.placement))},
          {"steps", steps}};
}

Json CeilingJson(const Plan& plan) {
  Json steps = Json::array();
  for (const int64_t context : plan.context_lens) {
    for (const int64_t batch : plan.batch_sizes) {
      steps.push_back({{"batch_size", batch},
                       {"context_len", context},
                       {"tokens_per_second", Rate(Ceiling(plan, batch, context), batch)}});
    }
  }
  return steps;
}

void AppendRow(std::string& text, const std::string& name, const std::vector<std::string>& cells) {
  absl::StrAppendFormat(&text, "  %-26s", name);
  for (const std::string& cell : cells) absl::StrAppendFormat(&text, " %11s", cell);
  while (text.back() == ' ') text.pop_back();
  absl::StrAppend(&text, "\n");
}

void AppendHead(std::string& text, const Plan& plan) {
  const ModelSpec& spec = plan.model.spec;
  const DeviceFigures& device = plan.device;
  absl::StrAppendFormat(
      &text, "%s: %.2f B parameters, of which a token meets %.2f B; %s of weights\n",
      spec.model_type, plan.model.parameters / 1e9, plan.model.ActiveParameters() / 1e9,
      BytesText(plan.model.ReadBytes(1e9) + plan.model.embedding.bytes));
  absl::StrAppendFormat(&text, "%d x %s: %s, %.1f GB/s, %s", plan.layout.num_ranks, device.name,
                        BytesText(device.memory_bytes), device.read_bytes_per_second / 1e9,
                        FlopsText(device.flops));
  if (device.fp8_flops > 0) {
    absl::StrAppend(&text, " (", FlopsText(device.fp8_flops), " in float8)");
  }
  absl::StrAppendFormat(&text, ", all-reduce %.0f us and %.0f GB/s one way; %s\n",
                        device.all_reduce.latency_seconds * 1e6,
                        device.all_reduce.bytes_per_second / 1e9, device.source);
}

void AppendKvBytes(std::string& text, const Plan& plan) {
  const KvBytesByKind kv = KvBytesOf(plan.model);
  absl::StrAppend(&text, "\nbytes of ", DTypeName(plan.layout.kv_cache_dtype),
                  " keys and values a token\n");
  for (const KindBytes& one : BytesOfKinds(kv)) {
    std::vector<std::string> cells = {Grouped(one.bytes)};
    if (one.kind == kv.own) cells.emplace_back("<- this model");
    AppendRow(text, one.name, cells);
  }
}

void AppendPlacements(std::string& text, const Plan& plan) {
  absl::StrAppendFormat(&text, "\nmemory, %s a rank for weights and cache\n",
                        BytesText(plan.memory_bytes));
  AppendRow(text, "", {"weights", "tokens", "heads", "received"});
  AppendRow(text, "", {"a rank", "of capacity", "a read", "a layer"});
  for (const PlacementPlan& one : plan.placements) {
    const StepTime time = TimeOf(plan, one, plan.load.max_num_seqs, plan.load.context_len);
    AppendRow(text, one.name,
              {BytesText(one.weight_bytes), Grouped(one.capacity_tokens),
               absl::StrCat(HeadsPerRead(plan.model.spec, one.placement)),
               absl::StrCat(Grouped(TotalTraffic(TrafficOf(plan.model, plan.device, one.placement),
                                                 time.all_to_all)),
                            " B")});
  }
  const HeadThreshold heads = HeadsToBeComputeBound(plan.model, plan.device);
  absl::StrAppendFormat(&text,
                        "  Attention is bound by arithmetic from %.0f query heads a read on (the "
                        "simple case,\n  peak / (2 x bandwidth): %.0f), the linear layers from "
                        "%s sequences on.\n  Received: by a rank, for each token of the batch.\n",
                        heads.exact, heads.simple, Grouped(plan.compute_bound_batch));
}

std::string RateCell(const StepTime& time, int64_t batch, bool fits) {
  return absl::StrCat(Rounded(Rate(time, batch)), fits ? " " : "*");
}

std::string ContextCell(const std::optional<int64_t>& context) {
  return context.has_value() ? absl::StrCat(Grouped(*context), " ") : "never ";
}

void AppendSteps(std::string& text, const Plan& plan, int64_t context) {
  absl::StrAppend(&text, "\ndecoded tokens/s at most, ", Grouped(context),
                  " tokens cached of each sequence (* does not fit)\n");
  std::vector<std::string> cells;
  for (const int64_t batch : plan.batch_sizes) cells.push_back(absl::StrCat(batch, " "));
  AppendRow(text, "sequences", cells);
  for (const PlacementPlan& one : plan.placements) {
    cells.clear();
    for (const int64_t batch : plan.batch_sizes) {
      cells.push_back(
          RateCell(TimeOf(plan, one, batch, context), batch, Fits(one, batch, context)));
    }
    AppendRow(text, one.name, cells);
  }
  cells.clear();
  for (const int64_t batch : plan.batch_sizes) {
    cells.push_back(RateCell(Ceiling(plan, batch, context), batch, /*fits=*/true));
  }
  AppendRow(text, "nothing sent or held twice", cells);
}

// How the time divides, and where it tips over.
void AppendBounds(std::string& text, const Plan& plan) {
  absl::StrAppend(&text, "\nof a step with ", plan.chosen.name, "\n");
  std::vector<std::string> linear, attention, links, outweighs, pays;
  const PlacementPlan& first = plan.placements.front();
  const Placement all = {.num_ranks = plan.layout.num_ranks, .num_stripes = plan.layout.num_ranks};
  for (const int64_t batch : plan.batch_sizes) {
    const StepTime time = TimeOf(plan, plan.chosen, batch, plan.context_lens.front());
    const auto share = [&](double part) {
      return absl::StrFormat("%.0f %% ", 100 * part / time.total());
    };
    linear.push_back(share(time.linear));
    attention.push_back(share(time.attention));
    links.push_back(share(time.communication));
    outweighs.push_back(
        ContextCell(AttentionBoundContext(plan.model, plan.device, plan.chosen.placement, batch)));
    pays.push_back(
        ContextCell(BreakEvenContext(plan.model, plan.device, all, first.placement, batch)));
  }
  AppendRow(text, "linear layers", linear);
  AppendRow(text, "attention", attention);
  if (plan.layout.num_ranks > 1) AppendRow(text, "communication", links);
  AppendRow(text, "attention outweighs from", outweighs);
  if (plan.layout.num_ranks > 1) {
    AppendRow(text, absl::StrCat(plan.layout.num_ranks, " stripes pay from"), pays);
  }
}

}  // namespace

std::string PlanAsText(const Plan& plan) {
  std::string text;
  AppendHead(text, plan);
  AppendKvBytes(text, plan);
  AppendPlacements(text, plan);
  for (const int64_t context : plan.context_lens) AppendSteps(text, plan, context);
  AppendBounds(text, plan);
  absl::StrAppend(&text, "\n");
  for (const std::string& advice : Advice(plan)) absl::StrAppend(&text, "! ", advice, "\n");
  if (plan.does_not_fit.empty()) absl::StrAppend(&text, RecommendedCommand(plan), "\n");
  return text;
}

std::string PlanAsJson(const Plan& plan) {
  const DeviceFigures& device = plan.device;
  const KvBytesByKind kv = KvBytesOf(plan.model);
  const HeadThreshold heads = HeadsToBeComputeBound(plan.model, device);
  const char* const own = kv.own == Kind::kMha   ? "mha"
                          : kv.own == Kind::kGqa ? "gqa"
                          : kv.own == Kind::kMqa ? "mqa"
                                                 : "mla";
  Json placements = Json::array();
  for (const PlacementPlan& one : plan.placements) placements.push_back(PlacementJson(plan, one));
  Json json = {{"model", plan.model_path},
               {"model_type", plan.model.spec.model_type},
               {"parameters", plan.model.parameters},
               {"active_parameters", plan.model.ActiveParameters()},
               {"tensor_parallel_size", plan.layout.num_ranks},
               {"device",
                {{"name", device.name},
                 {"memory_bytes", device.memory_bytes},
                 {"read_bytes_per_second", device.read_bytes_per_second},
                 {"flops", device.flops},
                 {"fp8_flops", device.fp8_flops},
                 {"source", device.source}}},
               {"memory_bytes", plan.memory_bytes},
               {"kv_cache_dtype", DTypeName(plan.layout.kv_cache_dtype)},
               {"kv_bytes_per_token",
                {{"own", own},
                 {"mha", kv.mha},
                 {"gqa", kv.gqa},
                 {"gqa_heads", kv.gqa_heads},
                 {"mqa", kv.mqa},
                 {"mla", kv.mla}}},
               {"compute_bound",
                {{"heads_per_read", heads.exact},
                 {"heads_per_read_simple", heads.simple},
                 {"linear_batch_size", plan.compute_bound_batch}}},
               {"placements", placements},
               {"ceilings", CeilingJson(plan)},
               {"choice",
                {{"stripes", plan.choice.num_stripes},
                 {"max_num_seqs", plan.load.max_num_seqs},
                 {"expected_context_len", plan.load.context_len},
                 {"why", plan.choice.why}}},
               {"advice", Advice(plan)}};
  json["command"] = plan.does_not_fit.empty() ? Json(RecommendedCommand(plan)) : Json();
  return json.dump(2) + "\n";
}

}  // namespace heddle
