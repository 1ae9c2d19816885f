#include "kernels/cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>
#include <vector>

#include "hwy/cache_control.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

constexpr std::chrono::microseconds kSpinTime(50);
constexpr int kSpinsPerClockRead = 32;
constexpr std::align_val_t kScratchAlignment{128};

}  // namespace

class CpuThreadPool::Impl {
 public:
  Impl(int num_threads, bool oversubscribed)
      : num_threads_(num_threads), oversubscribed_(oversubscribed) {
    CHECK_GE(num_threads, 1);
    threads_.reserve(num_threads - 1);
    for (int thread = 1; thread < num_threads; ++thread) {
      threads_.emplace_back([this, thread] { Work(thread); });
    }
  }

  ~Impl() {
    stopping_.store(true, std::memory_order_relaxed);
    run_.fetch_add(1, std::memory_order_release);
    run_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    FreeScratch();
  }

  int num_threads() const { return num_threads_; }

  void ParallelRun(absl::FunctionRef<void(int)> body) {
    if (num_threads_ > 1) {
      body_ = &body;
      num_running_.store(num_threads_ - 1, std::memory_order_relaxed);
      run_.fetch_add(1, std::memory_order_release);
      run_.notify_all();  // No system call unless a worker sleeps.
    }
    body(0);
    for (uint32_t running; (running = num_running_.load(std::memory_order_acquire)) != 0;) {
      WaitWhile(num_running_, running);
    }
  }

  std::byte* Scratch(size_t bytes) {
    if (bytes > scratch_bytes_) {
      FreeScratch();
      scratch_ = static_cast<std::byte*>(::operator new(bytes, kScratchAlignment, std::nothrow));
      CHECK(scratch_ != nullptr) << "out of memory for " << bytes << " bytes of scratch";
      scratch_bytes_ = bytes;
    }
    return scratch_;
  }

 private:
  void Work(int thread) {
    for (uint32_t last_run = 0;;) {
      WaitWhile(run_, last_run);
      ++last_run;  // The next run cannot start before this thread has finished this one.
      if (stopping_.load(std::memory_order_relaxed)) return;
      (*body_)(thread);
      if (num_running_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_running_.notify_one();
    }
  }

  // Returns, with acquire ordering, once `word` differs from `value`.
  void WaitWhile(const std::atomic<uint32_t>& word, uint32_t value) const {
    using Clock = std::chrono::steady_clock;
    for (Clock::time_point deadline = Clock::time_point::max();;) {
      for (int i = 0; i < kSpinsPerClockRead; ++i) {
        if (word.load(std::memory_order_acquire) != value) return;
        if (oversubscribed_) {
          std::this_thread::yield();
        } else {
          hwy::Pause();
        }
      }
      const Clock::time_point now = Clock::now();
      if (now >= deadline) break;
      deadline = std::min(deadline, now + kSpinTime);
    }
    word.wait(value, std::memory_order_acquire);
  }

  void FreeScratch() { ::operator delete(scratch_, kScratchAlignment); }

  const int num_threads_;
  const bool oversubscribed_;
  std::vector<std::thread> threads_;
  std::byte* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;

  // Written by the caller before it counts run_ up, read by the workers after they saw that.
  const absl::FunctionRef<void(int)>* body_ = nullptr;
  std::atomic<bool> stopping_{false};
  // Apart from each other, since the caller writes one while workers write the other.
  alignas(64) std::atomic<uint32_t> run_{0};
  alignas(64) std::atomic<uint32_t> num_running_{0};
};

CpuThreadPool::CpuThreadPool(int num_threads, bool oversubscribed)
    : impl_(std::make_unique<Impl>(num_threads, oversubscribed)) {}

CpuThreadPool::~CpuThreadPool() = default;

int CpuThreadPool::num_threads() const { return impl_->num_threads(); }

void CpuThreadPool::ParallelRun(absl::FunctionRef<void(int)> body) { impl_->ParallelRun(body); }

void CpuThreadPool::ParallelFor(int64_t num_tasks, absl::FunctionRef<void(int64_t)> body) {
  if (num_tasks == 1 || num_threads() == 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  if (num_tasks <= 0) return;
  std::atomic<int64_t> next{0};
  ParallelRun([&](int) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
      body(task);
    }
  });
}

std::byte* CpuThreadPool::Scratch(size_t bytes) { return impl_->Scratch(bytes); }

int NumAllowedCpus() {
  // A fixed cpu_set_t is too small on hosts with more than 1,024 CPUs; the call then fails.
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) return std::max(1, CPU_COUNT(&mask));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace heddle
