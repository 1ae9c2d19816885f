#include "launch/commands/batch_report.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "launch/commands/bench_figures.h"

namespace heddle {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMega = 1e6;
constexpr double kGiga = 1e9;
// In the order of the texts of a row; the first is on the left.
struct Column {
  int width;
  const char* above;
  const char* name;
  const char* unit;
};
constexpr Column kColumns[] = {
    {-12, "", "placement", ""},   {7, "", "input", "tokens"},        {6, "", "batch", ""},
    {8, "", "context", "tokens"}, {8, "step", "median", "ms"},       {8, "", "p10", "ms"},
    {8, "", "p90", "ms"},         {10, "", "decoded", "tokens/s"},   {8, "KV read", "a rank", "MB"},
    {8, "", "all", "MB"},         {9, "weights", "a rank", "MB"},    {7, "share", "read", "%"},
    {8, "", "FLOP/s", "%"},       {11, "", "predicted", "tokens/s"}, {7, "", "ratio", ""}};

std::string HeadLine(const char* Column::*text) {
  std::string line = "# ";
  for (const Column& column : kColumns) {
    absl::StrAppendFormat(&line, "%*s", column.width, column.*text);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

// "1 rank", "2 ranks"
std::string Counted(int64_t count, absl::string_view what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

// Four digits, or all before the point.
std::string Short(double value) {
  const int decimals = value < 10 ? 3 : value < 100 ? 2 : value < 1000 ? 1 : 0;
  return absl::StrFormat("%.*f", decimals, value);
}

Json CellJson(const BatchCell& cell, const DeviceFigures& device) {
  Json json = {{"placement", cell.placement_name},
               {"decode_context_parallel_size", cell.placement.num_stripes},
               {"enable_dp_attention", cell.placement.dp_attention},
               {"input_len", cell.input_len},
               {"batch_size", cell.batch_size},
               {"skipped", nullptr}};
  if (!cell.skipped.empty()) {
    json["skipped"] = cell.skipped;
    return json;
  }
  const std::vector<double>& seconds = cell.steps.seconds;
  std::vector<double> itls_ms;
  for (const double step : seconds) itls_ms.push_back(1e3 * step);
  json["context_len"] = cell.steps.context_len;
  json["output_tokens_per_second"] = TokensPerSecond(cell);
  json["mean_itl_ms"] = 1e3 * Mean(seconds);
  json["median_itl_ms"] = 1e3 * Percentile(seconds, 50);
  json["p10_itl_ms"] = 1e3 * Percentile(seconds, 10);
  json["p90_itl_ms"] = 1e3 * Percentile(seconds, 90);
  json["itls_ms"] = itls_ms;
  json["kv_bytes_per_step"] = cell.work.kv_bytes;
  json["kv_bytes_per_step_all_ranks"] = cell.work.kv_bytes_of_all;
  json["weight_bytes_per_step"] = cell.work.weight_bytes;
  json["flop_per_step"] = cell.work.operations;
  json["read_share"] = ReadShare(cell, device);
  json["flop_share"] = FlopShare(cell, device);
  json["predicted_tokens_per_second"] = PredictedTokensPerSecond(cell);
  json["predicted_linear_ms"] = 1e3 * cell.predicted.linear;
  json["predicted_attention_ms"] = 1e3 * cell.predicted.attention;
  json["predicted_communication_ms"] = 1e3 * cell.predicted.communication;
  json["measured_over_predicted"] = TokensPerSecond(cell) / PredictedTokensPerSecond(cell);
  return json;
}

}  // namespace

std::string TableHead(const BatchReport& report) {
  return absl::StrCat(
      absl::StrFormat("# %s on %s: %d decode steps of all sequences, after %d\n", report.model,
                      Counted(report.num_ranks, "rank"), report.num_iters, report.num_iters_warmup),
      absl::StrFormat(
          "# a rank reads %.1f GB/s and computes %.1f GFLOP/s while all do, as measured "
          "now\n#\n",
          report.device.read_bytes_per_second / kGiga, report.device.flops / kGiga),
      HeadLine(&Column::above), HeadLine(&Column::name), HeadLine(&Column::unit));
}

std::string TableRow(const BatchCell& cell, const DeviceFigures& device) {
  std::vector<std::string> texts = {cell.placement_name, absl::StrCat(cell.input_len),
                                    absl::StrCat(cell.batch_size)};
  if (cell.skipped.empty()) {
    const std::vector<double>& seconds = cell.steps.seconds;
    const double rate = TokensPerSecond(cell), predicted = PredictedTokensPerSecond(cell);
    for (const double value : {cell.steps.context_len, 1e3 * Percentile(seconds, 50),
                               1e3 * Percentile(seconds, 10), 1e3 * Percentile(seconds, 90), rate,
                               cell.work.kv_bytes / kMega, cell.work.kv_bytes_of_all / kMega,
                               cell.work.weight_bytes / kMega, 100 * ReadShare(cell, device),
                               100 * FlopShare(cell, device), predicted, rate / predicted}) {
      texts.push_back(Short(value));
    }
  }
  std::string row = "  ";
  for (size_t i = 0; i < texts.size(); ++i) {
    absl::StrAppendFormat(&row, "%*s", kColumns[i].width, texts[i]);
  }
  if (!cell.skipped.empty()) absl::StrAppend(&row, "  skipped: ", cell.skipped);
  return row + "\n";
}

Json BatchJson(const BatchReport& report, Json head) {
  head["num_iters"] = report.num_iters;
  head["num_iters_warmup"] = report.num_iters_warmup;
  head["read_bytes_per_second"] = report.device.read_bytes_per_second;
  head["flop_per_second"] = report.device.flops;
  head["cells"] = Json::array();
  for (const BatchCell& cell : report.cells) {
    head["cells"].push_back(CellJson(cell, report.device));
  }
  return head;
}

BatchChart ChartOf(const BatchReport& report) {
  BatchChart chart;
  chart.title = report.model;
  std::map<int64_t, int> colours;      // by prompt length
  std::map<std::string, int> markers;  // by placement
  std::map<std::pair<std::string, int64_t>, size_t> places;
  int64_t num_skipped = 0;
  for (const BatchCell& cell : report.cells) {
    const int colour =
        colours.try_emplace(cell.input_len, static_cast<int>(colours.size())).first->second;
    const int marker =
        markers.try_emplace(cell.placement_name, static_cast<int>(markers.size())).first->second;
    if (!cell.skipped.empty()) {
      ++num_skipped;
      continue;
    }
    const auto [place, is_new] =
        places.try_emplace({cell.placement_name, cell.input_len}, chart.lines.size());
    if (is_new) {
      chart.lines.push_back(
          {.label = absl::StrFormat("%d tokens, %s", cell.input_len, cell.placement_name),
           .colour = colour,
           .marker = marker,
           .measured = {},
           .predicted = {}});
    }
    ChartLine& line = chart.lines[place->second];
    const auto batch = static_cast<double>(cell.batch_size);
    line.measured.push_back({batch, TokensPerSecond(cell)});
    line.predicted.push_back({batch, PredictedTokensPerSecond(cell)});
  }
  chart.subtitle =
      absl::StrFormat("%s of %.1f GB/s and %.1f GFLOP/s each", Counted(report.num_ranks, "rank"),
                      report.device.read_bytes_per_second / kGiga, report.device.flops / kGiga);
  if (num_skipped > 0) {
    absl::StrAppendFormat(&chart.subtitle, "; %s skipped", Counted(num_skipped, "cell"));
  }
  return chart;
}

}  // namespace heddle
