#include "parallel/watch_thread.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// After an abort: until a rank prints what rank 0 has not, and until the job is ended by force.
constexpr Seconds kReportGrace(1);
constexpr Seconds kTerminateGrace(3);
// For the last words of a first rank that leaves.
constexpr Seconds kFarewellTime(0.1);

// Whether the process is gone. One in another namespace looks so from the start; see seen_alive_.
bool ProcessIsGone(int pid) { return kill(pid, 0) != 0 && errno == ESRCH; }

}  // namespace

// A plain struct of fixed layout: all ranks run the same binary.
struct WatchThread::NodeStatus {
  uint64_t progress = 0;
  int32_t waiting = 0;
  int32_t left_rank = -1;
  int32_t leaving = 0;  // nothing more will come
  int32_t reported = 0;
  int32_t abort_code = 0;
  char abort_text[1504] = {};
};

struct WatchThread::OtherNode {
  int first_rank = 0;
  std::string name;
  NodeSigns signs;
  // Boxed, because messages on their way must not move.
  std::unique_ptr<NodeStatus> outgoing = std::make_unique<NodeStatus>();
  std::unique_ptr<NodeStatus> incoming = std::make_unique<NodeStatus>();
  std::unique_ptr<Transfer> send;
  std::unique_ptr<Transfer> receive;
};

WatchThread::WatchThread(std::shared_ptr<Endpoint> endpoint, double timeout_seconds,
                         std::function<void()> terminate_job)
    : endpoint_(std::move(endpoint)),
      timeout_seconds_(timeout_seconds),
      terminate_job_(std::move(terminate_job)) {
  endpoint_->cell().pid = getpid();
  const int own_node = endpoint_->own_place().node;
  for (int rank = 0; rank < endpoint_->size(); ++rank) {
    const RankPlace& place = endpoint_->place(rank);
    if (place.node == own_node) {
      node_ranks_.push_back(rank);
    } else if (endpoint_->own_place().node_rank == 0 && place.node_rank == 0) {
      OtherNode node;
      node.first_rank = rank;
      node.name = absl::StrCat("the node ", place.host, " of rank ", rank);
      others_.push_back(std::move(node));
    }
  }
  ranks_.resize(node_ranks_.size());
  seen_alive_.resize(node_ranks_.size());
  if (endpoint_->size() > 1) thread_ = std::thread([this] { Loop(); });
}

WatchThread::~WatchThread() {
  endpoint_->cell().left = 1;
  stop_ = true;
  endpoint_->window().RingWatch(endpoint_->own_place().node_rank);
  if (thread_.joinable()) thread_.join();
}

void WatchThread::Loop() {
  std::vector<std::string> rank_names, node_names;
  for (const int rank : node_ranks_) rank_names.push_back(endpoint_->NameOf(rank));
  for (const OtherNode& node : others_) node_names.push_back(node.name);
  const bool sees_all_nodes = endpoint_->own_place().node_rank == 0 ||
                              static_cast<int>(node_ranks_.size()) == endpoint_->size();
  JobWatch watch(timeout_seconds_, sees_all_nodes, std::move(rank_names), std::move(node_names));

  const Seconds tick(std::clamp(timeout_seconds_ / 10, 0.01, 0.1));
  // Time in which this process was itself stopped must not count against the others.
  const double longest_look = std::clamp(timeout_seconds_ / 4, 2 * tick.count(), 1.0);
  NodeWindow& window = endpoint_->window();
  RankCell& cell = endpoint_->cell();
  std::vector<NodeSigns> nodes(others_.size());
  std::optional<Clock::time_point> aborted_at;
  bool terminated = false;
  auto last_look = Clock::now();
  while (!stop_) {
    const uint32_t rings = cell.watch_bell.load();
    cell.heartbeat.fetch_add(1);
    TradeStatus(/*leaving=*/false);
    const auto now = Clock::now();
    if (!window.aborted()) {
      LookAtRanks();
      for (size_t i = 0; i < others_.size(); ++i) nodes[i] = others_[i].signs;
      const double elapsed = std::min(Seconds(now - last_look).count(), longest_look);
      const absl::Status status = watch.Observe(elapsed, ranks_, nodes);
      if (!status.ok()) window.SetAbort(status);
    }
    last_look = now;
    if (window.aborted()) {
      if (!aborted_at) aborted_at = now;
      if (endpoint_->rank() == 0 || now - *aborted_at > kReportGrace) endpoint_->ReportAbort();
      if (terminate_job_ && !terminated && now - *aborted_at > kTerminateGrace) {
        terminated = true;
        terminate_job_();
      }
      // Spread the news before sleeping.
      TradeStatus(/*leaving=*/false);
    }
    if (!stop_) {
      FutexWait(cell.watch_bell, rings, std::chrono::duration_cast<std::chrono::nanoseconds>(tick));
    }
  }
  TradeStatus(/*leaving=*/true);
}

void WatchThread::LookAtRanks() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const RankCell& cell = endpoint_->window().cell(static_cast<int>(i));
    RankSigns& signs = ranks_[i];
    signs.progress = cell.progress.load();
    signs.heartbeat = cell.heartbeat.load();
    signs.waiting = cell.num_waiting.load() > 0;
    signs.idle = cell.num_idle.load() > 0;
    signs.left = cell.left.load() != 0;
    signs.wait_op = cell.wait_op.load();
    signs.wait_peer = cell.wait_peer.load();
    const int pid = cell.pid.load();
    if (pid != 0 && pid != getpid()) {
      const bool gone = ProcessIsGone(pid);
      signs.dead = gone && seen_alive_[i];
      if (!gone) seen_alive_[i] = true;
    }
  }
}

WatchThread::NodeStatus WatchThread::OwnStatus(bool leaving) const {
  NodeWindow& window = endpoint_->window();
  NodeStatus status;
  for (int i = 0; i < window.num_ranks(); ++i) {
    const RankCell& cell = window.cell(i);
    status.progress += cell.progress.load();
    if (cell.left.load() != 0) {
      status.left_rank = node_ranks_[i];
    } else if (cell.num_waiting.load() > 0) {
      status.waiting = 1;
    }
  }
  status.leaving = leaving ? 1 : 0;
  status.reported = window.reported() ? 1 : 0;
  const absl::Status abort = window.abort_status();
  status.abort_code = static_cast<int32_t>(abort.code());
  const size_t length = std::min(abort.message().size(), sizeof(status.abort_text) - 1);
  std::memcpy(status.abort_text, abort.message().data(), length);
  return status;
}

// A broken link needs no handling here: the other node falls silent, and that has a rule.
void WatchThread::TradeStatus(bool leaving) {
  if (others_.empty()) return;
  const NodeStatus own = OwnStatus(leaving);
  const auto deadline = Clock::now() + kFarewellTime;
  for (OtherNode& node : others_) {
    Accept(node);
    bool is_free = node.send == nullptr || node.send->Test().value_or(false);
    while (leaving && !is_free && Clock::now() < deadline)
      is_free = node.send->Test().value_or(false);
    if (!is_free) continue;  // It has not taken the last one yet.
    *node.outgoing = own;
    auto send =
        endpoint_->link().Send(node.first_rank, kNodeStatusTag, node.outgoing.get(), sizeof(own));
    node.send = send.ok() ? *std::move(send) : nullptr;
    while (leaving && node.send != nullptr && Clock::now() < deadline) {
      if (node.send->Test().value_or(true)) break;
    }
  }
}

void WatchThread::Accept(OtherNode& node) {
  while (!node.signs.all_left) {
    if (node.receive == nullptr) {
      auto receive = endpoint_->link().Recv(node.first_rank, kNodeStatusTag, node.incoming.get(),
                                            sizeof(NodeStatus));
      if (!receive.ok()) return;
      node.receive = *std::move(receive);
    }
    if (!node.receive->Test().value_or(false)) return;
    node.receive.reset();
    const NodeStatus& status = *node.incoming;
    ++node.signs.num_messages;
    node.signs.progress = status.progress;
    node.signs.waiting = status.waiting != 0;
    node.signs.left_rank = status.left_rank;
    node.signs.all_left = status.leaving != 0;
    if (status.abort_code != 0) {
      endpoint_->window().SetAbort(
          {static_cast<absl::StatusCode>(status.abort_code), status.abort_text});
    }
    if (status.reported != 0) endpoint_->window().ClaimReport();
  }
}

}  // namespace heddle
