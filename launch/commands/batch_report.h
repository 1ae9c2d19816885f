// What bench batch has measured: as a table, a row as soon as it is there, as JSON and as a chart.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/commands/batch_cell.h"
#include "launch/commands/batch_chart.h"
#include "nlohmann/json.hpp"
#include "runtime/device_table.h"

namespace heddle {

// Figures are of the mean step but where they say otherwise, and per rank those of the busiest one.
struct BatchReport {
  std::string model;
  int num_ranks = 1;
  int64_t num_iters = 0;
  int64_t num_iters_warmup = 0;
  DeviceFigures device;  // of a rank while all are busy
  std::vector<BatchCell> cells;
};

// Lines that begin with "#"; the columns' units are in the last.
std::string TableHead(const BatchReport& report);
std::string TableRow(const BatchCell& cell, const DeviceFigures& device);

// Appended to `head`: settings, the machine and "cells", one object each.
nlohmann::ordered_json BatchJson(const BatchReport& report, nlohmann::ordered_json head);

BatchChart ChartOf(const BatchReport& report);

}  // namespace heddle
