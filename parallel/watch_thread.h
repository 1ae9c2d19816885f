// The thread of each rank that shows a sign of life and looks after the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "parallel/endpoint.h"
#include "parallel/job_watch.h"

namespace heddle {

// Owned by the rank's control channel. Wakes ten times a second, or when the job is aborted. It
// bumps the rank's heartbeat, applies the rules of JobWatch to the ranks of its node, and aborts
// the job by them. The first rank of each node also trades node status with the other first ranks;
// an abort travels with it. Rank 0 prints the job's error.
class WatchThread {
 public:
  // `terminate_job` (may be null) ends all processes; called when the job was aborted seconds ago
  // and this rank has still not left.
  WatchThread(std::shared_ptr<Endpoint> endpoint, double timeout_seconds,
              std::function<void()> terminate_job);
  // The rank leaves the job.
  ~WatchThread();
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

 private:
  struct NodeStatus;  // what first ranks send each other
  struct OtherNode;   // one of them, as seen from here

  void Loop();
  void LookAtRanks();
  void TradeStatus(bool leaving);
  NodeStatus OwnStatus(bool leaving) const;
  void Accept(OtherNode& node);

  const std::shared_ptr<Endpoint> endpoint_;
  const double timeout_seconds_;
  const std::function<void()> terminate_job_;
  std::vector<int> node_ranks_;  // world rank of each rank of this node
  std::vector<RankSigns> ranks_;
  std::vector<bool> seen_alive_;   // whose process ids mean something here
  std::vector<OtherNode> others_;  // empty unless this is the first rank of its node
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace heddle
