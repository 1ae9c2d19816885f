#include "launch/commands/batch_chart.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "runtime/text/utf8.h"

namespace heddle {
namespace {

// In units of the view box.
constexpr double kWidth = 960, kHeight = 560;
constexpr double kLeft = 84, kRight = 700, kTop = 92, kBottom = 486;
constexpr double kLegendLeft = 728, kLegendLine = 26;
constexpr double kMarker = 4.5, kPredictedMarker = 3;
constexpr double kLeastTickDistance = 30;

constexpr int kNumColours = 6;
constexpr char kStyle[] = R"(<style>
.paper{fill:#ffffff}.ink{fill:#1d2433}.faint{fill:#5c667a}
.grid{stroke:#e3e7ee;stroke-width:1}.axis{stroke:#8a94a6;stroke-width:1}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:13px}
.title{font-size:19px;font-weight:600}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.dashed{fill:none;stroke-width:1.6;stroke-dasharray:5 5;stroke-linejoin:round;opacity:.8}
.key{stroke:#5c667a}
.marker{stroke:#ffffff;stroke-width:1.2}
.hollow{fill:#ffffff;stroke-width:1.3}
.s0{stroke:#1f6fd6}.f0{fill:#1f6fd6}.s1{stroke:#d9542b}.f1{fill:#d9542b}
.s2{stroke:#1a8a5f}.f2{fill:#1a8a5f}.s3{stroke:#8a4fc7}.f3{fill:#8a4fc7}
.s4{stroke:#b27a00}.f4{fill:#b27a00}.s5{stroke:#c2377e}.f5{fill:#c2377e}
@media (prefers-color-scheme:dark){
.paper{fill:#12161f}.ink{fill:#eef1f6}.faint{fill:#9aa5b8}
.grid{stroke:#262d3b}.axis{stroke:#5f6b80}.key{stroke:#9aa5b8}.marker{stroke:#12161f}.hollow{fill:#12161f}
.s0{stroke:#6cabff}.f0{fill:#6cabff}.s1{stroke:#ff9468}.f1{fill:#ff9468}
.s2{stroke:#5fd3a1}.f2{fill:#5fd3a1}.s3{stroke:#c09bf5}.f3{fill:#c09bf5}
.s4{stroke:#ecbb4c}.f4{fill:#ecbb4c}.s5{stroke:#f58bbd}.f5{fill:#f58bbd}
}
</style>
)";

// As text of an element: XML knows no control characters, escaped or not.
std::string XmlText(absl::string_view bytes) {
  std::string text = ToValidUtf8(bytes);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  // U+FFFE and U+FFFF are no XML either.
  return absl::StrReplaceAll(text, {{"&", "&amp;"},
                                    {"<", "&lt;"},
                                    {">", "&gt;"},
                                    {"\xEF\xBF\xBE", "\xEF\xBF\xBD"},
                                    {"\xEF\xBF\xBF", "\xEF\xBF\xBD"}});
}

// The end of a path that is too long for a line.
std::string Tail(const std::string& text, size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  size_t start = text.size() - most_bytes;
  while (start < text.size() && (text[start] & 0xC0) == 0x80) ++start;  // within a code point
  return absl::StrCat("\u2026", text.substr(start));
}

bool CanBeDrawn(const ChartPoint& point) {
  return std::isfinite(point.batch) && point.batch > 0 && std::isfinite(point.tokens_per_second) &&
         point.tokens_per_second > 0;
}

std::vector<ChartPoint> Drawn(std::vector<ChartPoint> points) {
  points.erase(std::remove_if(points.begin(), points.end(),
                              [](const ChartPoint& point) { return !CanBeDrawn(point); }),
               points.end());
  std::sort(points.begin(), points.end(),
            [](const ChartPoint& a, const ChartPoint& b) { return a.batch < b.batch; });
  return points;
}

// Maps [low, high] to [from, to], both ends included.
struct LogAxis {
  double low, high;
  double from, to;
  std::vector<double> ticks;

  double At(double value) const {
    return from +
           (to - from) * (std::log2(value) - std::log2(low)) / (std::log2(high) - std::log2(low));
  }
};

// A tick at each batch size that leaves room for its number.
LogAxis BatchAxis(const std::set<double>& batches) {
  LogAxis axis = {.low = 1, .high = 2, .from = kLeft + 24, .to = kRight - 24, .ticks = {}};
  if (batches.empty()) return axis;
  axis.low = *batches.begin();
  axis.high = *batches.rbegin();
  if (axis.low == axis.high) {
    axis.low /= 2;
    axis.high *= 2;
  }
  for (const double batch : batches) {
    if (axis.ticks.empty() || axis.At(batch) - axis.At(axis.ticks.back()) >= kLeastTickDistance) {
      axis.ticks.push_back(batch);
    }
  }
  return axis;
}

// From 1, 2 or 5 times a power of ten to another; at more than three powers, ticks at some alone.
LogAxis RateAxis(double least, double most) {
  const auto step = [](int index) {  // 1, 2, 5, 10, ...
    const double digits[] = {1, 2, 5};
    const int power = static_cast<int>(std::floor(index / 3.0));
    return digits[index - 3 * power] * std::pow(10.0, power);
  };
  int first = 3 * static_cast<int>(std::floor(std::log10(least)));
  while (step(first + 1) <= least) ++first;
  int last = first + 1;
  while (step(last) < most) ++last;
  LogAxis axis = {
      .low = step(first), .high = step(last), .from = kBottom, .to = kTop + 8, .ticks = {}};
  int stride = 1;
  if (last - first > 9) {
    stride = 3 * (1 + (last - first) / 30);
    first = 3 * static_cast<int>(std::ceil(first / 3.0));
  }
  for (int index = first; index <= last; index += stride) axis.ticks.push_back(step(index));
  return axis;
}

// "500", "20k", "1.5M"
std::string TickText(double value) {
  if (value >= 1e6 && value < 1e15) return absl::StrFormat("%gM", value / 1e6);
  if (value >= 1e4 && value < 1e6) return absl::StrFormat("%gk", value / 1e3);
  return absl::StrFormat("%g", value);
}

void AddText(double x, double y, absl::string_view classes, absl::string_view anchor,
             const std::string& text, std::string& svg) {
  absl::StrAppendFormat(&svg,
                        "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\" text-anchor=\"%s\">%s</text>\n",
                        x, y, classes, anchor, XmlText(text));
}

void AddSegment(double x1, double y1, double x2, double y2, absl::string_view classes,
                std::string& svg) {
  absl::StrAppendFormat(&svg,
                        "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n",
                        x1, y1, x2, y2, classes);
}

// A circle, a square, a triangle or a diamond of radius `r`; `hint` shows where a pointer rests.
void AddMarker(double x, double y, double r, int marker, const std::string& classes,
               const std::string& hint, std::string& svg) {
  const std::string title = hint.empty() ? "" : absl::StrCat("<title>", XmlText(hint), "</title>");
  switch (marker % 4) {
    case 0:
      absl::StrAppendFormat(&svg,
                            "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\" class=\"%s\">%s</circle>\n",
                            x, y, r, classes, title);
      return;
    case 1:
      absl::StrAppendFormat(&svg, "<path d=\"M%.1f %.1fh%.1fv%.1fh%.1fz\" class=\"%s\">%s</path>\n",
                            x - r, y - r, 2 * r, 2 * r, -2 * r, classes, title);
      return;
    case 2:
      absl::StrAppendFormat(
          &svg, "<path d=\"M%.1f %.1fL%.1f %.1fL%.1f %.1fz\" class=\"%s\">%s</path>\n", x,
          y - 1.3 * r, x + 1.2 * r, y + 0.9 * r, x - 1.2 * r, y + 0.9 * r, classes, title);
      return;
    default:
      absl::StrAppendFormat(
          &svg, "<path d=\"M%.1f %.1fl%.1f %.1fl%.1f %.1fl%.1f %.1fz\" class=\"%s\">%s</path>\n", x,
          y - 1.4 * r, 1.4 * r, 1.4 * r, -1.4 * r, 1.4 * r, -1.4 * r, -1.4 * r, classes, title);
  }
}

void AddPolyline(const std::vector<ChartPoint>& points, const LogAxis& batches,
                 const LogAxis& rates, const std::string& classes, std::string& svg) {
  if (points.size() == 1) {  // as long as in the legend
    const double x = batches.At(points[0].batch), y = rates.At(points[0].tokens_per_second);
    AddSegment(x - 14, y, x + 14, y, classes, svg);
  }
  if (points.size() < 2) return;
  absl::StrAppend(&svg, "<polyline class=\"", classes, "\" points=\"");
  for (const ChartPoint& point : points) {
    absl::StrAppendFormat(&svg, "%s%.1f,%.1f", &point == &points.front() ? "" : " ",
                          batches.At(point.batch), rates.At(point.tokens_per_second));
  }
  svg += "\"/>\n";
}

void AddFrame(const LogAxis& batches, const LogAxis& rates, std::string& svg) {
  for (const double tick : rates.ticks) {
    const double y = rates.At(tick);
    AddSegment(kLeft, y, kRight, y, tick == rates.low ? "axis" : "grid", svg);
    AddText(kLeft - 10, y + 4.5, "faint", "end", TickText(tick), svg);
  }
  AddSegment(kLeft, kBottom, kRight, kBottom, "axis", svg);
  for (const double tick : batches.ticks) {
    const double x = batches.At(tick);
    AddSegment(x, kBottom, x, kBottom + 5, "axis", svg);
    AddText(x, kBottom + 22, "faint", "middle", TickText(tick), svg);
  }
  AddText(kLeft, kTop - 8, "faint", "start", "decoded tokens/s", svg);
  AddText((kLeft + kRight) / 2, kBottom + 48, "faint", "middle", "sequences in a decode step", svg);
}

// What each line stands for, then how measurements and predictions are told apart.
void AddLegend(const std::vector<ChartLine>& lines, std::string& svg) {
  const double room = kBottom - kTop - 2 * kLegendLine;
  const double distance =
      std::min(kLegendLine, room / std::max<double>(1, static_cast<double>(lines.size())));
  double y = kTop + 8;
  for (const ChartLine& line : lines) {
    AddSegment(kLegendLeft, y, kLegendLeft + 28, y,
               absl::StrCat("line s", line.colour % kNumColours), svg);
    AddMarker(kLegendLeft + 14, y, kMarker, line.marker,
              absl::StrCat("marker f", line.colour % kNumColours), "", svg);
    AddText(kLegendLeft + 40, y + 4.5, "ink", "start", line.label, svg);
    y += distance;
  }
  y = kBottom - kLegendLine;
  AddSegment(kLegendLeft, y, kLegendLeft + 28, y, "line key", svg);
  AddText(kLegendLeft + 40, y + 4.5, "faint", "start", "measured", svg);
  y += kLegendLine;
  AddSegment(kLegendLeft, y, kLegendLeft + 28, y, "dashed key", svg);
  AddText(kLegendLeft + 40, y + 4.5, "faint", "start", "predicted, at best", svg);
}

}  // namespace

std::string BatchChartSvg(const BatchChart& chart) {
  std::vector<ChartLine> lines = chart.lines;
  std::set<double> batches;
  std::set<double> rates;
  for (ChartLine& line : lines) {
    for (std::vector<ChartPoint>* points : {&line.measured, &line.predicted}) {
      *points = Drawn(std::move(*points));
      for (const ChartPoint& point : *points) {
        batches.insert(point.batch);
        rates.insert(point.tokens_per_second);
      }
    }
  }
  const LogAxis batch_axis = BatchAxis(batches);
  const LogAxis rate_axis =
      rates.empty() ? RateAxis(1, 10) : RateAxis(*rates.begin(), *rates.rbegin());

  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
      "height=\"%.0f\" role=\"img\">\n<title>%s</title>\n",
      kWidth, kHeight, kWidth, kHeight,
      XmlText(absl::StrCat("Decoded tokens/s over batch sizes: ", chart.title)));
  svg += kStyle;
  absl::StrAppendFormat(&svg, "<rect width=\"%.0f\" height=\"%.0f\" class=\"paper\"/>\n", kWidth,
                        kHeight);
  AddText(28, 36, "ink title", "start", Tail(chart.title, 80), svg);
  AddText(28, 58, "faint", "start", chart.subtitle, svg);
  AddFrame(batch_axis, rate_axis, svg);
  // Predictions below all measurements.
  for (const bool measured : {false, true}) {
    for (const ChartLine& line : lines) {
      const std::string colour = absl::StrCat(line.colour % kNumColours);
      const std::vector<ChartPoint>& points = measured ? line.measured : line.predicted;
      AddPolyline(points, batch_axis, rate_axis,
                  absl::StrCat(measured ? "line s" : "dashed s", colour), svg);
      for (const ChartPoint& point : points) {
        AddMarker(batch_axis.At(point.batch), rate_axis.At(point.tokens_per_second),
                  measured ? kMarker : kPredictedMarker, line.marker,
                  absl::StrCat(measured ? "marker f" : "hollow s", colour),
                  absl::StrFormat("%s: %g sequences, %.1f tokens/s%s", line.label, point.batch,
                                  point.tokens_per_second, measured ? "" : " predicted"),
                  svg);
      }
    }
  }
  if (rates.empty()) {
    AddText((kLeft + kRight) / 2, (kTop + kBottom) / 2, "faint", "middle", "nothing was measured",
            svg);
  }
  AddLegend(lines, svg);
  return svg + "</svg>\n";
}

std::string BatchChartHtml(const BatchChart& chart) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
      XmlText(chart.title),
      "</title>\n<style>\nbody{margin:0;min-height:100vh;display:grid;place-items:center;"
      "background:#ffffff}\nbody>svg{width:min(100%,1200px);height:auto}\n"
      "@media (prefers-color-scheme:dark){body{background:#12161f}}\n</style>\n</head>\n<body>\n",
      BatchChartSvg(chart), "</body>\n</html>\n");
}

}  // namespace heddle
