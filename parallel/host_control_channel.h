// The control channel over a node's window and, between nodes, messages.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "parallel/control_channel.h"
#include "parallel/endpoint.h"
#include "parallel/message_ring.h"
#include "parallel/watch_thread.h"

namespace heddle {

// Ranks on rank 0's node talk through rings in its window, the others straight to rank 0.
class HostControlChannel : public ControlChannel {
 public:
  // What it takes of the window of a node of so many ranks. Rank 0's node needs it.
  static size_t WindowBytes(int num_node_ranks);
  static void Format(void* memory, int num_node_ranks);

  HostControlChannel(std::shared_ptr<Endpoint> endpoint, uint64_t window_offset,
                     double timeout_seconds, std::function<void()> terminate_job);
  // Waits until other nodes have taken what was sent.
  ~HostControlChannel() override;

  absl::Status Broadcast(std::string& message) override;
  absl::StatusOr<std::vector<std::string>> Gather(absl::string_view message) override;
  absl::StatusOr<int64_t> AllReduceMin(int64_t value) override;
  absl::Status Barrier() override;
  void ReportProgress() override { endpoint_->ReportProgress(); }
  void Abort(const absl::Status& status) override { endpoint_->Abort(status); }
  absl::Status abort_status() const override { return endpoint_->abort_status(); }

 private:
  // A message to another node that may still be on its way.
  struct Outgoing {
    uint64_t length;
    std::string text;
    std::vector<std::unique_ptr<Transfer>> transfers;
  };

  void SetIdle(bool idle) override { endpoint_->AddIdle(idle ? 1 : -1); }
  absl::Status BroadcastAs(std::string& message, WaitReason reason);
  absl::StatusOr<std::vector<std::string>> GatherAs(absl::string_view message, WaitOp op);
  absl::Status SendFar(int rank, absl::string_view message, WaitOp op);
  absl::Status ReceiveFar(int rank, std::string& message, WaitReason reason);

  const std::shared_ptr<Endpoint> endpoint_;
  std::vector<int> far_ranks_;  // rank 0: all that live on other nodes
  bool is_near_ = false;        // shares rank 0's node
  std::unique_ptr<MessageRing> from_root_;
  std::vector<std::unique_ptr<MessageRing>> to_root_;  // by node rank; null but those of this rank
  std::deque<Outgoing> outgoing_;
  WatchThread watch_;
};

}  // namespace heddle
