// What bench batch makes of its measurements: steps, table, JSON and chart.
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "launch/commands/batch_cell.h"
#include "launch/commands/batch_chart.h"
#include "launch/commands/batch_report.h"
#include "launch/commands/bench_figures.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(BenchFigures, PercentilesAreNumpys) {
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 50), 2.5);
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 0), 1);
  EXPECT_EQ(Percentile({4, 1, 3, 2}, 100), 4);
  EXPECT_NEAR(Percentile({4, 1, 3, 2}, 90), 3.7, 1e-12);
  EXPECT_EQ(Percentile({7}, 90), 7);
  EXPECT_EQ(Percentile({}, 50), 0);
  EXPECT_EQ(Mean({1, 2, 6}), 3);
}

TEST(CommonSteps, BeginWhenTheLastSequenceHasItsFirstToken) {
  // Steps end at 1, 2, 4, 7, 11 and 16; the second sequence starts in the second.
  const std::vector<std::vector<double>> times = {{0.9, 1.8, 3.8, 6.9, 11, 15.5},
                                                  {2, 4, 7, 10.9, 16}};
  const DecodeSteps all = CommonSteps(times, 10, 0, 9);
  EXPECT_THAT(all.seconds, ElementsAre(2, 3, 4, 5));
  // The first attends to 10 tokens of the prompt and 2 to 5 of its own, the other to one less.
  EXPECT_EQ(all.context_len, 13);

  const DecodeSteps some = CommonSteps(times, 10, 1, 2);
  EXPECT_THAT(some.seconds, ElementsAre(3, 4));
  EXPECT_EQ(some.context_len, 13);

  EXPECT_THAT(CommonSteps(times, 10, 4, 2).seconds, ElementsAre());
  EXPECT_THAT(CommonSteps({{1, 2}, {}}, 10, 0, 2).seconds, ElementsAre());
  EXPECT_THAT(CommonSteps({{1, 2}, {3}}, 10, 0, 2).seconds, ElementsAre());
}

BatchCell Cell(const std::string& placement, int64_t input_len, int64_t batch_size) {
  BatchCell cell;
  cell.placement_name = placement;
  cell.placement = {.num_ranks = 2, .num_stripes = placement == "2 stripes" ? 2 : 1};
  cell.input_len = input_len;
  cell.batch_size = batch_size;
  cell.steps = {.seconds = {0.010, 0.030, 0.020}, .context_len = 12.5};
  cell.work = {.weight_bytes = 3e6, .kv_bytes = 1e6, .kv_bytes_of_all = 2e6, .operations = 40e6};
  cell.predicted = {.linear = 0.004, .attention = 0.003, .communication = 0.001};
  return cell;
}

BatchReport Report() {
  BatchReport report;
  report.model = "some/model";
  report.num_ranks = 2;
  report.num_iters = 3;
  report.num_iters_warmup = 1;
  report.device.read_bytes_per_second = 1e9;
  report.device.flops = 8e9;
  report.cells = {Cell("replicated", 10, 4), Cell("replicated", 10, 1), Cell("2 stripes", 10, 4)};
  report.cells.push_back(Cell("2 stripes", 1000, 4));
  report.cells.back().skipped = "needs 4096 tokens of cache; there are 64";
  return report;
}

TEST(BatchReport, TheTableHasARowForEachCell) {
  const BatchReport report = Report();
  const std::string head = TableHead(report);
  EXPECT_THAT(head, AllOf(HasSubstr("some/model on 2 ranks:"), HasSubstr("1.0 GB/s"),
                          HasSubstr("8.0 GFLOP/s"), HasSubstr("tokens/s")));
  for (const absl::string_view line : absl::StrSplit(head, '\n', absl::SkipEmpty())) {
    EXPECT_EQ(line[0], '#');
  }
  const std::string row = TableRow(report.cells[0], report.device);
  const std::vector<std::string> words = absl::StrSplit(row, ' ', absl::SkipWhitespace());
  EXPECT_THAT(words,
              ElementsAre("replicated", "10", "4", "12.50", "20.00", "12.00", "28.00", "200.0",
                          "1.000", "2.000", "3.000", "20.00", "25.00", "500.0", "0.400\n"));
  EXPECT_THAT(TableRow(report.cells[3], report.device),
              AllOf(HasSubstr("2 stripes"), HasSubstr("1000"),
                    HasSubstr("skipped: needs 4096 tokens of cache; there are 64\n")));
}

TEST(BatchReport, JsonHasTheFiguresOfEachCell) {
  const nlohmann::ordered_json json = BatchJson(Report(), {{"model", "some/model"}, {"tp", 2}});
  EXPECT_EQ(json["model"], "some/model");
  EXPECT_EQ(json["num_iters"], 3);
  EXPECT_EQ(json["read_bytes_per_second"], 1e9);
  ASSERT_EQ(json["cells"].size(), 4);
  const nlohmann::ordered_json& cell = json["cells"][2];
  EXPECT_EQ(cell["placement"], "2 stripes");
  EXPECT_EQ(cell["decode_context_parallel_size"], 2);
  EXPECT_EQ(cell["batch_size"], 4);
  EXPECT_TRUE(cell["skipped"].is_null());
  EXPECT_EQ(cell["itls_ms"].size(), 3);
  EXPECT_THAT(cell["output_tokens_per_second"].get<double>(), DoubleNear(200, 1e-9));
  EXPECT_THAT(cell["median_itl_ms"].get<double>(), DoubleNear(20, 1e-9));
  EXPECT_THAT(cell["read_share"].get<double>(), DoubleNear(0.2, 1e-12));
  EXPECT_THAT(cell["flop_share"].get<double>(), DoubleNear(0.25, 1e-12));
  EXPECT_THAT(cell["measured_over_predicted"].get<double>(), DoubleNear(0.4, 1e-12));
  EXPECT_EQ(cell["kv_bytes_per_step_all_ranks"], 2e6);

  const nlohmann::ordered_json& skipped = json["cells"][3];
  EXPECT_EQ(skipped["skipped"], "needs 4096 tokens of cache; there are 64");
  EXPECT_FALSE(skipped.contains("output_tokens_per_second"));
}

TEST(BatchReport, TheChartHasALineForEachPlacementAndLength) {
  BatchReport report = Report();
  report.cells.push_back(Cell("replicated", 1000, 4));
  const BatchChart chart = ChartOf(report);
  EXPECT_EQ(chart.title, "some/model");
  EXPECT_THAT(chart.subtitle, HasSubstr("1 cell skipped"));
  ASSERT_EQ(chart.lines.size(), 3);
  EXPECT_EQ(chart.lines[0].label, "10 tokens, replicated");
  EXPECT_EQ(chart.lines[0].measured.size(), 2);
  EXPECT_EQ(chart.lines[1].label, "10 tokens, 2 stripes");
  // Colours tell lengths apart, markers placements.
  EXPECT_EQ(chart.lines[1].colour, chart.lines[0].colour);
  EXPECT_NE(chart.lines[1].marker, chart.lines[0].marker);
  EXPECT_NE(chart.lines[2].colour, chart.lines[0].colour);
  EXPECT_EQ(chart.lines[2].marker, chart.lines[0].marker);
}

// Enough of XML for what the chart uses: what is wrong, or nothing.
std::string XmlFault(absl::string_view xml) {
  std::vector<std::string> open;
  for (size_t at = 0; at < xml.size();) {
    if (xml[at] == '&') {
      const absl::string_view rest = xml.substr(at, 6);
      if (!absl::StartsWith(rest, "&amp;") && !absl::StartsWith(rest, "&lt;") &&
          !absl::StartsWith(rest, "&gt;")) {
        return absl::StrCat("a bare &: ", xml.substr(at, 20));
      }
    }
    if (static_cast<unsigned char>(xml[at]) < 0x20 && xml[at] != '\n') return "a control character";
    if (xml[at] != '<') {
      ++at;
      continue;
    }
    const size_t end = xml.find('>', at);
    if (end == absl::string_view::npos) return "a tag without an end";
    const absl::string_view tag = xml.substr(at + 1, end - at - 1);
    if (absl::StrContains(tag, "<")) return absl::StrCat("a bare <: ", tag);
    int quotes = 0;
    for (const char c : tag) quotes += c == '"';
    if (quotes % 2 != 0) return absl::StrCat("an open attribute: ", tag);
    const std::string name(tag.substr(0, tag.find_first_of(" /", 1)));
    if (tag[0] == '/') {
      if (open.empty() || tag.substr(1) != open.back()) return absl::StrCat("out of turn: ", tag);
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  return open.empty() ? "" : absl::StrCat("not closed: ", open.back());
}

std::string CheckedSvg(const BatchChart& chart) {
  const std::string svg = BatchChartSvg(chart);
  EXPECT_EQ(XmlFault(svg), "");
  // As numbers: both are also letters of words in the style sheet's fonts.
  for (const char* bad :
       {"\"nan", "\"inf", ",nan", ",inf", "-nan", "-inf", "Mnan", " nan", " inf"}) {
    EXPECT_THAT(svg, Not(HasSubstr(bad)));
  }
  return svg;
}

ChartLine Line(std::vector<ChartPoint> points) {
  return {.label = "a line", .colour = 7, .marker = 5, .measured = points, .predicted = points};
}

TEST(BatchChart, IsWellFormedWhateverTheFigures) {
  const double huge = 1e300, tiny = 1e-300;
  const double not_a_number = std::nan("");
  EXPECT_THAT(CheckedSvg({}), HasSubstr("nothing was measured"));
  for (const std::vector<ChartPoint>& points :
       {std::vector<ChartPoint>{{1, 5}},
        {{8, 100}},
        {{1, 10}, {64, 10}},
        {{1, 3}, {2, 4}, {3, 4.5}, {4, 7}, {5, 8}},
        {{64, 900}, {1, 20}, {8, 150}},
        {{1, tiny}, {2, huge}},
        {{1, 0}, {2, not_a_number}, {4, HUGE_VAL}, {not_a_number, 3}, {0, 3}, {8, 40}}}) {
    const std::string svg = CheckedSvg({.title = "t", .subtitle = "s", .lines = {Line(points)}});
    EXPECT_THAT(svg, HasSubstr("a line: "));
    EXPECT_THAT(svg, Not(HasSubstr("nothing was measured")));
  }
  const std::vector<ChartPoint> bad = {{1, 0}};
  EXPECT_THAT(CheckedSvg({.title = "t", .subtitle = "s", .lines = {Line(bad)}}),
              HasSubstr("nothing was measured"));
}

TEST(BatchChart, DrawsEveryPointAndLine) {
  const ChartLine line = Line({{64, 900}, {1, 20}, {8, 150}});
  const std::string svg = CheckedSvg({.title = "t", .subtitle = "s", .lines = {line, line}});
  const auto count = [&svg](absl::string_view text) {
    return std::vector<absl::string_view>(absl::StrSplit(svg, text)).size() - 1;
  };
  EXPECT_EQ(count("<polyline class=\"line "), 2);
  EXPECT_EQ(count("<polyline class=\"dashed "), 2);
  EXPECT_EQ(count("a line: 8 sequences, 150.0 tokens/s</title>"), 2);
  EXPECT_EQ(count("a line: 8 sequences, 150.0 tokens/s predicted</title>"), 2);
  for (const char* text : {">64</text>", ">1000</text>", "tokens/s</text>", "measured</text>",
                           "predicted, at best</text>", "prefers-color-scheme:dark"}) {
    EXPECT_THAT(svg, HasSubstr(text));
  }
  // From left to right whatever the order of the cells.
  const size_t start = svg.find("points=\"") + 8;
  double last = 0;
  for (const absl::string_view point :
       absl::StrSplit(svg.substr(start, svg.find('"', start) - start), ' ')) {
    const double x = std::stod(std::string(point));
    EXPECT_GT(x, last);
    last = x;
  }
}

TEST(BatchChart, EscapesNames) {
  ChartLine line = Line({{1, 5}, {2, 9}});
  line.label = "<b> & \"c\"";
  const std::string svg = CheckedSvg({.title = "a<b>&amp;\x01\xFF\n" + std::string(200, 'x'),
                                      .subtitle = "1 > 0",
                                      .lines = {line}});
  EXPECT_THAT(svg, AllOf(HasSubstr("&lt;b&gt; &amp; \"c\""), HasSubstr("1 &gt; 0")));
  EXPECT_THAT(svg, HasSubstr("a&lt;b&gt;&amp;amp; \xEF\xBF\xBD xxx"));  // the title of the file
}

TEST(BatchChart, APageHoldsTheWholeChart) {
  const BatchChart chart = {.title = "<model>", .subtitle = "s", .lines = {Line({{1, 5}, {2, 9}})}};
  const std::string page = BatchChartHtml(chart);
  EXPECT_TRUE(absl::StartsWith(page, "<!DOCTYPE html>"));
  EXPECT_THAT(page, AllOf(HasSubstr(BatchChartSvg(chart)), HasSubstr("&lt;model&gt;")));
  for (const char* outside : {"<script", "<link", "src=", "href=", "url(", "@import"}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
}

}  // namespace
}  // namespace heddle
