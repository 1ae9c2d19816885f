// Products of activations that were quantised to int8 with panels of blocks. Private to the CPU's
// product.
#pragma once

#include <cstdint>

#include "kernels/gemm/panel_task.h"

namespace heddle {

// 32 consecutive activations of a row, aligned with a group of the weights' k.
//   value = scale * quant
struct ActivationGroup {
  int8_t quants[kGroupElements];
  int32_t sums[2];   // of the first and of the last 16 quants
  float scale;       // largest magnitude / 127; NaN if a value is not finite
  float scaled_sum;  // scale * (sums[0] + sums[1])
};

struct Int8Kernel {
  int max_tile_rows;
  // Quantises x [count], count <= 32, as elements [first, first + count) of a group; the others
  // are zeros.
  void (*quantise)(const float* x, int first, int count, ActivationGroup& group);
  // x: the row tiles one after the other, each [num_groups][rows of the tile].
  void (*multiply)(const PanelTask& task, const ActivationGroup* x);
};

// That of the best instruction set of this CPU.
const Int8Kernel& GetInt8Kernel();

}  // namespace heddle
