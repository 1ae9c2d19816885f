// The ops of the CPU.
#pragma once

#include "kernels/kernel_table.h"

namespace heddle {

const KernelTable& CpuKernelTable();

}  // namespace heddle
