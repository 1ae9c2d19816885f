// Tokens a second over batch sizes, drawn as SVG.
#pragma once

#include <string>
#include <vector>

namespace heddle {

struct ChartPoint {
  double batch = 0;
  double tokens_per_second = 0;
};

struct ChartLine {
  std::string label;
  int colour = 0;  // which of the palette, as is the next; they begin again when they run out
  int marker = 0;
  std::vector<ChartPoint> measured;   // solid, with markers
  std::vector<ChartPoint> predicted;  // dashed
};

// Points that are not positive and finite are left out; the order of points is free. Texts are
// any bytes.
struct BatchChart {
  std::string title;
  std::string subtitle;
  std::vector<ChartLine> lines;
};

// Both axes are logarithmic. Needs nothing from outside the file: neither scripts nor fonts.
// Colours follow the reader's light or dark scheme.
std::string BatchChartSvg(const BatchChart& chart);
// A page that shows nothing else.
std::string BatchChartHtml(const BatchChart& chart);

}  // namespace heddle
