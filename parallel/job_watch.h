// The rules by which a job is found dead: pure, so that an idle hour can be tested in no time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "parallel/node_window.h"

namespace heddle {

// What is seen of a rank of this node.
struct RankSigns {
  uint64_t progress = 0;
  uint64_t heartbeat = 0;
  bool waiting = false;  // for a peer, inside `wait_op`
  bool idle = false;     // owes no progress
  bool left = false;
  bool dead = false;  // its process is gone
  WaitOp wait_op = WaitOp::kNone;
  int wait_peer = -1;  // world rank, -1 for several
};

// What is heard of another node, from its first rank.
struct NodeSigns {
  uint64_t num_messages = 0;
  uint64_t progress = 0;  // sum over its ranks
  bool waiting = false;   // any of its ranks
  int left_rank = -1;     // a world rank of it that left, if any
  bool all_left = false;
};

// Remembers how long each sign has stood still. Used by one watch thread. A rule that cannot name
// the culprit waits a little longer than the timeout, since another watch may know it.
class JobWatch {
 public:
  // Names as they appear in errors: "rank 3 (host)", "the node host of rank 4". Without
  // `sees_all_nodes` nothing is concluded from what other nodes do not do.
  JobWatch(double timeout_seconds, bool sees_all_nodes, std::vector<std::string> rank_names,
           std::vector<std::string> node_names);

  // One look at everyone, `elapsed_seconds` after the one before, counting only time in which this
  // process itself ran. An error names the culprit and ends the job.
  absl::Status Observe(double elapsed_seconds, std::span<const RankSigns> ranks,
                       std::span<const NodeSigns> nodes);

 private:
  // A counter and for how long it has not moved.
  struct Stillness {
    uint64_t value = 0;
    double seconds = 0;
    void Look(uint64_t now, double elapsed_seconds) {
      seconds = now == value ? seconds + elapsed_seconds : 0;
      value = now;
    }
  };

  // Somebody who left the job, or nothing.
  std::string Leaver(std::span<const RankSigns> ranks, std::span<const NodeSigns> nodes) const;
  absl::Status CheckRanks(std::span<const RankSigns> ranks, std::span<const NodeSigns> nodes) const;
  absl::Status CheckJob(std::span<const RankSigns> ranks, std::span<const NodeSigns> nodes) const;
  std::string DescribeWaits(std::span<const RankSigns> ranks,
                            std::span<const NodeSigns> nodes) const;

  const double timeout_seconds_;
  const double vague_timeout_seconds_;
  const bool sees_all_nodes_;
  const std::vector<std::string> rank_names_;
  const std::vector<std::string> node_names_;
  std::vector<Stillness> heartbeats_;     // per rank of this node
  std::vector<Stillness> busy_progress_;  // stands still only while the rank is busy
  std::vector<Stillness> deserted_;       // ... while it waits and somebody has left
  std::vector<Stillness> messages_;       // per other node
  Stillness job_;                         // all progress together, while somebody waits
};

}  // namespace heddle
