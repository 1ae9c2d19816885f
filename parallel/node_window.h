// The memory that the ranks of one node share: an MPI-3 window between processes, plain heap
// between the threads of a ThreadWorld. Everything in it is addressed by offset or index, since
// each process maps it elsewhere.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace heddle {

// Two lines, because processors fetch lines in pairs.
inline constexpr size_t kCacheLineBytes = 128;

inline size_t RoundUpToCacheLine(size_t bytes) {
  return (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
}

// What a rank waits in, for the error text when nothing moves any more.
enum class WaitOp : uint32_t {
  kNone,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kSend,
  kRecv,
  kSplit,
  kControlBroadcast,
  kControlGather,
  kBarrier,
  kAgreeOnMinimum,
};
absl::string_view WaitOpName(WaitOp op);

// What a rank shows the others of its node. Written by its owner, but for the two bells.
struct alignas(kCacheLineBytes) RankCell {
  std::atomic<uint64_t> progress;    // reports, completed collectives
  std::atomic<uint64_t> heartbeat;   // of the process, by its watch thread
  std::atomic<int32_t> num_waiting;  // threads that sleep until a peer acts
  std::atomic<int32_t> num_idle;     // threads that owe no progress
  std::atomic<WaitOp> wait_op;       // of the latest sleeper
  std::atomic<int32_t> wait_peer;    // world rank it waits for; -1: several
  std::atomic<uint32_t> left;        // 1 once its World is gone
  std::atomic<int32_t> pid;
  // A sleeping thread of this rank waits on `doorbell`; whoever publishes something rings it, but
  // only if there are sleepers.
  alignas(kCacheLineBytes) std::atomic<uint32_t> doorbell;
  std::atomic<int32_t> sleepers;
  // Rung to wake the rank's watch thread before its next tick.
  std::atomic<uint32_t> watch_bell;
};

// Wakes all threads of all processes that wait on `word`, which was changed before.
void FutexWakeAll(std::atomic<uint32_t>& word);
// Sleeps while `word` equals `expected`, at most `timeout`; may wake early.
void FutexWait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout);

// One rank's view of the window. Thread-safe.
class NodeWindow {
 public:
  static size_t BytesFor(int num_ranks, size_t arena_bytes);

  // Lays out fresh memory; by one rank of the node, before any other constructs its NodeWindow.
  static void Format(void* memory, int num_ranks, size_t arena_bytes);

  // `memory` is aligned to kCacheLineBytes and is kept until the last user is gone.
  explicit NodeWindow(std::shared_ptr<void> memory);

  int num_ranks() const;
  RankCell& cell(int node_rank) const;

  // A piece of the arena, aligned to a cache line and never given back; its offset, or
  // ResourceExhausted. The bytes are not cleared.
  absl::StatusOr<uint64_t> Allocate(size_t bytes);
  std::byte* At(uint64_t offset) const;

  // The first error wins. True if this was it.
  bool SetAbort(const absl::Status& status);
  bool aborted() const;
  static bool IsAborted(void* memory);
  absl::Status abort_status() const;
  // Whether the error's text has been printed; the first of several claimants gets true.
  bool ClaimReport();
  bool WaitForReport(std::chrono::nanoseconds timeout) const;
  bool reported() const;

  void RingDoorbell(int node_rank) const;
  void RingWatch(int node_rank) const;

 private:
  struct Header;
  Header& header() const;

  std::shared_ptr<void> memory_;
};

}  // namespace heddle
