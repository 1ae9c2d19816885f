#include "parallel/endpoint.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kSpinTime(50);
constexpr int kLooksPerClock = 32;
// A sleeper looks again by itself after this, should a peer have died between store and bell.
constexpr milliseconds kLongestSleep(100);
constexpr microseconds kFirstLinkPoll(50);
constexpr microseconds kLongestLinkPoll(1000);
constexpr milliseconds kReportTime(1000);

void RelaxCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Endpoint::Endpoint(int rank, std::vector<RankPlace> places, std::shared_ptr<NodeWindow> window,
                   std::unique_ptr<PeerLink> link, bool yields)
    : rank_(rank),
      places_(std::move(places)),
      window_(std::move(window)),
      link_(std::move(link)),
      yields_(yields),
      cell_(window_->cell(places_[rank].node_rank)) {}

absl::Status Endpoint::Wait(const WaitReason& reason, absl::FunctionRef<bool()> ready) {
  if (ready()) return absl::OkStatus();
  // Reading a clock takes longer than a few looks, but a yield may take far longer than a clock.
  const int looks_per_clock = yields_ ? 1 : kLooksPerClock;
  Clock::time_point spin_end;  // set when the first looks were in vain
  while (true) {
    for (int i = 0; i < looks_per_clock; ++i) {
      if (yields_) {
        sched_yield();
      } else {
        RelaxCpu();
      }
      if (ready()) return absl::OkStatus();
    }
    if (window_->aborted()) return abort_status();
    const auto now = Clock::now();
    if (spin_end == Clock::time_point()) spin_end = now + kSpinTime;
    if (now >= spin_end) break;
  }

  std::atomic<int32_t>& counted_as = reason.idle ? cell_.num_idle : cell_.num_waiting;
  cell_.wait_op = reason.op;
  cell_.wait_peer = reason.peer;
  counted_as.fetch_add(1);
  auto sleep = reason.polls_link ? kFirstLinkPoll : microseconds(kLongestSleep);
  absl::Status status;
  while (true) {
    // Either the publisher sees a sleeper and rings, or the sleeper sees what was published: the
    // stores and loads of both sides are sequentially consistent.
    const uint32_t rings = cell_.doorbell.load();
    cell_.sleepers.fetch_add(1);
    const bool is_ready = ready();
    const bool is_over = is_ready || window_->aborted();
    if (!is_over) FutexWait(cell_.doorbell, rings, sleep);
    cell_.sleepers.fetch_sub(1);
    if (is_over) {
      if (!is_ready) status = abort_status();
      break;
    }
    if (reason.polls_link) sleep = std::min(2 * sleep, kLongestLinkPoll);
  }
  counted_as.fetch_sub(1);
  return status;
}

absl::Status Endpoint::WaitForTransfers(WaitReason reason,
                                        std::span<const std::unique_ptr<Transfer>> transfers) {
  reason.polls_link = true;
  size_t num_done = 0;
  absl::Status failure;
  const absl::Status status = Wait(reason, [&] {
    for (; num_done < transfers.size(); ++num_done) {
      const absl::StatusOr<bool> done = transfers[num_done]->Test();
      if (!done.ok()) {
        failure = done.status();
        return true;
      }
      if (!*done) return false;
    }
    return true;
  });
  return failure.ok() ? status : failure;
}

std::string Endpoint::NameOf(int world_rank) const {
  return absl::StrCat("rank ", world_rank, " (", places_[world_rank].host, ")");
}

void Endpoint::Abort(const absl::Status& status) {
  CHECK(!status.ok()) << "a job is aborted with an error";
  window_->SetAbort({status.code(), absl::StrCat(NameOf(rank_), ": ", status.message())});
  // Rank 0's watch thread prints; a rank that cannot reach it speaks for itself.
  if (size() == 1 || !window_->WaitForReport(kReportTime)) ReportAbort();
}

void Endpoint::ReportAbort() {
  if (window_->ClaimReport()) LOG(ERROR) << "the job ends: " << abort_status().message();
}

}  // namespace heddle
