// Rows of an element-wise op dealt to the threads of a rank.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/thread_pool.h"

namespace heddle {

// Runs body(begin, end) on ranges that cover [0, rows). Ranges hold enough elements to be worth a
// thread, so a decode step stays on the caller.
inline void ParallelRows(CpuThreadPool& pool, int64_t rows, int64_t elements_per_row,
                         absl::FunctionRef<void(int64_t begin, int64_t end)> body) {
  constexpr int64_t kMinElements = 16384;
  const int64_t rows_per_task =
      std::max<int64_t>(1, kMinElements / std::max<int64_t>(1, elements_per_row));
  const int64_t num_tasks = (rows + rows_per_task - 1) / rows_per_task;
  pool.ParallelFor(num_tasks, [&](int64_t task) {
    const int64_t begin = task * rows_per_task;
    body(begin, std::min(rows, begin + rows_per_task));
  });
}

}  // namespace heddle
