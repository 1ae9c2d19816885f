// One rank's hold on the job: how it waits for others, and how it learns that the job is over.
// Communicators and the control channel are built on it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "parallel/node_window.h"
#include "parallel/peer_link.h"

namespace heddle {

// Where a world rank lives. Nodes are numbered by their lowest rank.
struct RankPlace {
  int node = 0;
  int node_rank = 0;
  std::string host;
};

// What a wait is for.
struct WaitReason {
  WaitOp op = WaitOp::kNone;
  int peer = -1;            // world rank; -1 for several
  bool idle = false;        // nothing is owed: the next plan may be an hour away
  bool polls_link = false;  // no bell is rung when it is over
};

// Shared by the objects of one rank. Thread-safe.
class Endpoint {
 public:
  // `link` is null when there is one node. With `yields` waits give way to other threads instead
  // of spinning: for nodes with more ranks than CPUs.
  Endpoint(int rank, std::vector<RankPlace> places, std::shared_ptr<NodeWindow> window,
           std::unique_ptr<PeerLink> link, bool yields);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(places_.size()); }
  const RankPlace& place(int world_rank) const { return places_[world_rank]; }
  const std::vector<RankPlace>& places() const { return places_; }
  const RankPlace& own_place() const { return places_[rank_]; }
  NodeWindow& window() { return *window_; }
  RankCell& cell() { return cell_; }
  PeerLink& link() { return *link_; }

  // Returns when `ready` holds, or the job's error. Spins for at most 50 us, then sleeps until the
  // doorbell rings. `ready` reads shared words with sequential consistency.
  absl::Status Wait(const WaitReason& reason, absl::FunctionRef<bool()> ready);
  // Until all transfers are complete.
  absl::Status WaitForTransfers(WaitReason reason,
                                std::span<const std::unique_ptr<Transfer>> transfers);
  // To be called after a sequentially consistent store that rank `node_rank` of this node may wait
  // for.
  void Wake(int node_rank) {
    if (window_->cell(node_rank).sleepers.load() > 0) window_->RingDoorbell(node_rank);
  }

  void ReportProgress() { cell_.progress.fetch_add(1, std::memory_order_relaxed); }
  void AddIdle(int delta) { cell_.num_idle.fetch_add(delta); }

  // The lowest message tag that no communicator of this rank has used; by its worker thread.
  int next_tag() const { return next_tag_; }
  void set_next_tag(int tag) { next_tag_ = tag; }

  // See ControlChannel::Abort.
  void Abort(const absl::Status& status);
  absl::Status abort_status() const { return window_->abort_status(); }
  // Prints the job's first error unless somebody has.
  void ReportAbort();

  // "rank 3 (host)".
  std::string NameOf(int world_rank) const;

 private:
  const int rank_;
  const std::vector<RankPlace> places_;
  const std::shared_ptr<NodeWindow> window_;
  const std::unique_ptr<PeerLink> link_;
  const bool yields_;
  RankCell& cell_;
  int next_tag_ = kFirstCommunicatorTag + 1;
};

}  // namespace heddle
