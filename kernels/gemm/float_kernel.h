// Products of float32 activations with panels of plain weights or of blocks, which are widened.
// Private to the CPU's product.
#pragma once

#include "kernels/gemm/panel_task.h"

namespace heddle {

struct FloatKernel {
  int max_tile_rows;
  // x: the row tiles one after the other, each [padded_k / 8][rows of the tile][8]; zeros before
  // and after the k elements that are ours.
  void (*multiply)(const PanelTask& task, const float* x);
};

// That of the best instruction set of this CPU.
const FloatKernel& GetFloatKernel();

}  // namespace heddle
