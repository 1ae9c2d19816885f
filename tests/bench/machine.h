// What this machine can do at this very moment, for benches to compare a kernel with.
//
// Speeds of a virtual machine drift by half within an hour, and a virtual CPU that has just woken
// is slow for a while. So a bench wakes all threads first, measures the machine inside each
// repetition, right beside the kernel, and reports the median of the ratios.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "kernels/base/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace heddle {

// Uses the threads of a CPU backend, on its stream. Owned by a bench program.
class Machine {
 public:
  // Of a CPU backend; both must outlive it.
  Machine(Backend& backend, Stream& stream);

  // Keeps all threads busy until together they are nearly num_threads times as fast as one.
  void Wake();
  // Of float32 multiply-adds, a multiply-add being two operations.
  double FlopsPerSecond();
  // Of memory that no cache holds.
  double ReadBytesPerSecond();

 private:
  Stream& stream_;
  DeviceBuffer memory_;
};

// Seconds that `work` takes.
double Seconds(absl::FunctionRef<void()> work);

// Seconds of one call of `work`, over as many as fill 20 ms.
double SecondsPerCall(absl::FunctionRef<void()> work);

// The median of what `ratio` returns when called `repetitions` times.
double Median(int repetitions, absl::FunctionRef<double()> ratio);

// Prints the line "name ratio asked" that ratios.sh collects; asked is 0 where nothing is.
void PrintRatio(absl::string_view name, double ratio, double asked);

// Threads that benches use: two, or what this process may use if that is less.
int BenchThreads();

}  // namespace heddle
