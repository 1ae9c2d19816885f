#include "launch/commands/batch_cell.h"

#include <algorithm>
#include <cmath>

#include "launch/commands/bench_figures.h"

namespace heddle {

DecodeSteps CommonSteps(const std::vector<std::vector<double>>& token_seconds, int64_t input_len,
                        int64_t num_warmup, int64_t num_steps) {
  DecodeSteps steps;
  double start = 0;  // the end of the last step that was not common to all
  for (const std::vector<double>& times : token_seconds) {
    if (times.empty()) return steps;
    start = std::max(start, times.front());
  }
  // Of each sequence, its first token after that.
  std::vector<int64_t> firsts;
  int64_t num_common = num_warmup + num_steps;
  for (const std::vector<double>& times : token_seconds) {
    const int64_t first = std::upper_bound(times.begin(), times.end(), start) - times.begin();
    firsts.push_back(first);
    num_common = std::min(num_common, static_cast<int64_t>(times.size()) - first);
  }
  double tokens = 0;
  for (int64_t step = 0; step < num_common; ++step) {
    double end = start;
    for (size_t i = 0; i < firsts.size(); ++i) {
      end = std::max(end, token_seconds[i][firsts[i] + step]);
      // The first token comes of the prompt alone, and each one after attends to one more.
      if (step >= num_warmup) tokens += static_cast<double>(input_len + firsts[i] + step);
    }
    if (step >= num_warmup) steps.seconds.push_back(end - start);
    start = end;
  }
  const size_t num_rows = steps.seconds.size() * firsts.size();
  if (num_rows > 0) steps.context_len = tokens / static_cast<double>(num_rows);
  return steps;
}

void Predict(const ModelCosts& model, const DeviceFigures& device, BatchCell& cell) {
  const int64_t context_len = std::llround(cell.steps.context_len);
  cell.work = WorkOfStep(model, device, cell.placement, cell.batch_size, context_len);
  cell.predicted = PredictStep(model, device, cell.placement, cell.batch_size, context_len);
}

double TokensPerSecond(const BatchCell& cell) {
  return static_cast<double>(cell.batch_size) / Mean(cell.steps.seconds);
}

double PredictedTokensPerSecond(const BatchCell& cell) {
  return static_cast<double>(cell.batch_size) / cell.predicted.total();
}

double ReadShare(const BatchCell& cell, const DeviceFigures& device) {
  return (cell.work.weight_bytes + cell.work.kv_bytes) / Mean(cell.steps.seconds) /
         device.read_bytes_per_second;
}

double FlopShare(const BatchCell& cell, const DeviceFigures& device) {
  return cell.work.operations / Mean(cell.steps.seconds) / device.flops;
}

}  // namespace heddle
