// One cell of bench batch: a placement of the cache, a prompt length and a batch size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/cost_model.h"
#include "runtime/device_table.h"

namespace heddle {

// Decode steps in which every sequence of a batch got a token.
struct DecodeSteps {
  std::vector<double> seconds;  // from the end of the step before
  double context_len = 0;       // tokens that a query attended to, on average
};

// Those after `num_warmup`, at most `num_steps`. `token_seconds`: of each sequence, when its tokens
// came, on one clock; nothing else ran meanwhile. The steps are counted from the one that gave the
// last sequence its first token.
DecodeSteps CommonSteps(const std::vector<std::vector<double>>& token_seconds, int64_t input_len,
                        int64_t num_warmup, int64_t num_steps);

struct BatchCell {
  std::string placement_name;
  Placement placement;
  int64_t input_len = 0;
  int64_t batch_size = 0;
  std::string skipped;  // why there are no figures; empty if there are

  DecodeSteps steps;
  StepWork work;       // of a step of such a context
  StepTime predicted;  // likewise
};

// Fills in what the cost model says about the steps; `device` is one rank's.
void Predict(const ModelCosts& model, const DeviceFigures& device, BatchCell& cell);

// Of a cell with steps.
double TokensPerSecond(const BatchCell& cell);
double PredictedTokensPerSecond(const BatchCell& cell);
// What the busiest rank did per second, over what it can do.
double ReadShare(const BatchCell& cell, const DeviceFigures& device);
double FlopShare(const BatchCell& cell, const DeviceFigures& device);

}  // namespace heddle
