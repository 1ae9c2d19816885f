#include "parallel/node_window.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <new>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

constexpr size_t kMaxAbortText = 1500;

enum AbortState : uint32_t { kRunning = 0, kWriting = 1, kAborted = 2 };

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "atomics in shared memory must be plain words");

}  // namespace

struct alignas(kCacheLineBytes) NodeWindow::Header {
  int32_t num_ranks;
  uint64_t arena_begin;
  uint64_t arena_end;
  std::atomic<uint64_t> arena_next;
  alignas(kCacheLineBytes) std::atomic<uint32_t> abort_state;
  std::atomic<uint32_t> reported;
  int32_t abort_code;
  char abort_text[kMaxAbortText + 1];
};

absl::string_view WaitOpName(WaitOp op) {
  switch (op) {
    case WaitOp::kNone:
      return "nothing";
    case WaitOp::kAllReduce:
      return "AllReduce";
    case WaitOp::kAllGather:
      return "AllGatherV";
    case WaitOp::kReduceScatter:
      return "ReduceScatterV";
    case WaitOp::kAllToAll:
      return "AllToAllV";
    case WaitOp::kBroadcast:
      return "Broadcast";
    case WaitOp::kSend:
      return "Send";
    case WaitOp::kRecv:
      return "Recv";
    case WaitOp::kSplit:
      return "Split";
    case WaitOp::kControlBroadcast:
      return "the control channel's Broadcast";
    case WaitOp::kControlGather:
      return "the control channel's Gather";
    case WaitOp::kBarrier:
      return "Barrier";
    case WaitOp::kAgreeOnMinimum:
      return "AllReduceMin";
  }
  return "an unknown call";
}

void FutexWakeAll(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
          0);
}

void FutexWait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout) {
  const int64_t nanoseconds = std::max<int64_t>(timeout.count(), 0);
  const timespec relative = {static_cast<time_t>(nanoseconds / 1'000'000'000),
                             static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &relative, nullptr,
          0);
}

size_t NodeWindow::BytesFor(int num_ranks, size_t arena_bytes) {
  return sizeof(Header) + num_ranks * sizeof(RankCell) + RoundUpToCacheLine(arena_bytes);
}

void NodeWindow::Format(void* memory, int num_ranks, size_t arena_bytes) {
  CHECK_EQ(reinterpret_cast<uintptr_t>(memory) % kCacheLineBytes, 0u);
  const size_t cells_end = BytesFor(num_ranks, 0);
  std::memset(memory, 0, cells_end);
  auto* header = new (memory) Header;
  header->num_ranks = num_ranks;
  header->arena_begin = cells_end;
  header->arena_end = BytesFor(num_ranks, arena_bytes);
  header->arena_next = cells_end;
  header->abort_state = kRunning;
  header->reported = 0;
  auto* cells = reinterpret_cast<RankCell*>(static_cast<std::byte*>(memory) + sizeof(Header));
  for (int i = 0; i < num_ranks; ++i) {
    auto* cell = new (&cells[i]) RankCell;
    cell->wait_op = WaitOp::kNone;
    cell->wait_peer = -1;
  }
}

NodeWindow::NodeWindow(std::shared_ptr<void> memory) : memory_(std::move(memory)) {}

NodeWindow::Header& NodeWindow::header() const { return *static_cast<Header*>(memory_.get()); }

int NodeWindow::num_ranks() const { return header().num_ranks; }

RankCell& NodeWindow::cell(int node_rank) const {
  auto* base = static_cast<std::byte*>(memory_.get()) + sizeof(Header);
  return reinterpret_cast<RankCell*>(base)[node_rank];
}

absl::StatusOr<uint64_t> NodeWindow::Allocate(size_t bytes) {
  const uint64_t rounded = RoundUpToCacheLine(bytes);
  const uint64_t offset = header().arena_next.fetch_add(rounded);
  if (offset + rounded > header().arena_end) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the node's shared window of ", header().arena_end - header().arena_begin,
        " bytes has no room for ", bytes, " more: too many communicators were split off"));
  }
  return offset;
}

std::byte* NodeWindow::At(uint64_t offset) const {
  return static_cast<std::byte*>(memory_.get()) + offset;
}

bool NodeWindow::SetAbort(const absl::Status& status) {
  CHECK(!status.ok());
  uint32_t expected = kRunning;
  if (!header().abort_state.compare_exchange_strong(expected, kWriting)) return false;
  header().abort_code = static_cast<int32_t>(status.code());
  const size_t length = std::min(status.message().size(), kMaxAbortText);
  std::memcpy(header().abort_text, status.message().data(), length);
  header().abort_text[length] = '\0';
  header().abort_state = kAborted;
  for (int i = 0; i < num_ranks(); ++i) {
    RingDoorbell(i);
    RingWatch(i);
  }
  return true;
}

bool NodeWindow::aborted() const { return header().abort_state.load() == kAborted; }

bool NodeWindow::IsAborted(void* memory) {
  return static_cast<Header*>(memory)->abort_state.load() == kAborted;
}

absl::Status NodeWindow::abort_status() const {
  if (!aborted()) return absl::OkStatus();
  return {static_cast<absl::StatusCode>(header().abort_code), header().abort_text};
}

bool NodeWindow::ClaimReport() {
  if (header().reported.exchange(1) != 0) return false;
  FutexWakeAll(header().reported);
  return true;
}

bool NodeWindow::reported() const { return header().reported.load() != 0; }

bool NodeWindow::WaitForReport(std::chrono::nanoseconds timeout) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!reported()) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left.count() <= 0) return false;
    FutexWait(header().reported, 0, left);
  }
  return true;
}

void NodeWindow::RingDoorbell(int node_rank) const {
  RankCell& target = cell(node_rank);
  target.doorbell.fetch_add(1);
  FutexWakeAll(target.doorbell);
}

void NodeWindow::RingWatch(int node_rank) const {
  RankCell& target = cell(node_rank);
  target.watch_bell.fetch_add(1);
  FutexWakeAll(target.watch_bell);
}

}  // namespace heddle
