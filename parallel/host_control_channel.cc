#include "parallel/host_control_channel.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace heddle {
namespace {

// Messages to other nodes that rank 0 runs ahead by, per rank.
constexpr size_t kMaxOutgoingPerRank = 4;

// Rank 0's ring is read by the other ranks of its node, theirs are read by rank 0.
uint64_t RingToRootOffset(int num_node_ranks, int node_rank) {
  return MessageRing::BytesFor(num_node_ranks - 1) + (node_rank - 1) * MessageRing::BytesFor(1);
}

}  // namespace

size_t HostControlChannel::WindowBytes(int num_node_ranks) {
  return RingToRootOffset(num_node_ranks, num_node_ranks);
}

void HostControlChannel::Format(void* memory, int num_node_ranks) {
  MessageRing::Format(memory, num_node_ranks - 1);
  for (int i = 1; i < num_node_ranks; ++i) {
    MessageRing::Format(static_cast<std::byte*>(memory) + RingToRootOffset(num_node_ranks, i), 1);
  }
}

HostControlChannel::HostControlChannel(std::shared_ptr<Endpoint> endpoint, uint64_t window_offset,
                                       double timeout_seconds, std::function<void()> terminate_job)
    : endpoint_(std::move(endpoint)), watch_(endpoint_, timeout_seconds, std::move(terminate_job)) {
  const int root_node = endpoint_->place(0).node;
  is_near_ = endpoint_->own_place().node == root_node;
  std::vector<int> near_ranks;
  for (int rank = 1; rank < endpoint_->size(); ++rank) {
    (endpoint_->place(rank).node == root_node ? near_ranks : far_ranks_).push_back(rank);
  }
  if (!is_near_) return;
  const int num_near = static_cast<int>(near_ranks.size()) + 1;
  from_root_ = std::make_unique<MessageRing>(endpoint_, window_offset, 0, near_ranks);
  to_root_.resize(num_near);
  for (const int rank : near_ranks) {
    if (endpoint_->rank() != 0 && endpoint_->rank() != rank) continue;
    const int node_rank = endpoint_->place(rank).node_rank;
    to_root_[node_rank] = std::make_unique<MessageRing>(
        endpoint_, window_offset + RingToRootOffset(num_near, node_rank), rank,
        std::vector<int>{0});
  }
}

HostControlChannel::~HostControlChannel() {
  for (const Outgoing& out : outgoing_) {
    // After an abort nobody may be there to take it.
    if (!endpoint_->WaitForTransfers({WaitOp::kControlBroadcast}, out.transfers).ok()) return;
  }
}

absl::Status HostControlChannel::Broadcast(std::string& message) {
  const bool idle = endpoint_->rank() != 0;
  return BroadcastAs(message, {WaitOp::kControlBroadcast, /*peer=*/0, idle});
}

absl::Status HostControlChannel::BroadcastAs(std::string& message, WaitReason reason) {
  if (endpoint_->rank() == 0) {
    RETURN_IF_ERROR(from_root_->Send(message, reason.op));
    for (const int rank : far_ranks_) RETURN_IF_ERROR(SendFar(rank, message, reason.op));
  } else if (is_near_) {
    RETURN_IF_ERROR(from_root_->Receive(message, reason));
  } else {
    RETURN_IF_ERROR(ReceiveFar(0, message, reason));
  }
  endpoint_->ReportProgress();
  // A job that is over sends nothing more, even where there is room.
  return abort_status();
}

absl::StatusOr<std::vector<std::string>> HostControlChannel::Gather(absl::string_view message) {
  return GatherAs(message, WaitOp::kControlGather);
}

absl::StatusOr<std::vector<std::string>> HostControlChannel::GatherAs(absl::string_view message,
                                                                      WaitOp op) {
  std::vector<std::string> messages;
  if (endpoint_->rank() == 0) {
    messages.resize(endpoint_->size());
    messages[0].assign(message.data(), message.size());
    for (int rank = 1; rank < endpoint_->size(); ++rank) {
      const RankPlace& place = endpoint_->place(rank);
      RETURN_IF_ERROR(place.node == endpoint_->own_place().node
                          ? to_root_[place.node_rank]->Receive(messages[rank], {op})
                          : ReceiveFar(rank, messages[rank], {op}));
    }
  } else if (is_near_) {
    RETURN_IF_ERROR(to_root_[endpoint_->own_place().node_rank]->Send(message, op));
  } else {
    RETURN_IF_ERROR(SendFar(0, message, op));
  }
  endpoint_->ReportProgress();
  RETURN_IF_ERROR(abort_status());
  return messages;
}

absl::StatusOr<int64_t> HostControlChannel::AllReduceMin(int64_t value) {
  constexpr WaitOp kOp = WaitOp::kAgreeOnMinimum;
  const absl::string_view bytes(reinterpret_cast<const char*>(&value), sizeof(value));
  ASSIGN_OR_RETURN(const std::vector<std::string> values, GatherAs(bytes, kOp));
  for (const std::string& other : values) {
    int64_t theirs;
    if (other.size() != sizeof(theirs)) {
      return absl::InternalError(
          absl::StrCat("AllReduceMin received ", other.size(),
                       " bytes: the ranks do not make the same calls in the same order"));
    }
    std::memcpy(&theirs, other.data(), sizeof(theirs));
    value = std::min(value, theirs);
  }
  std::string smallest(reinterpret_cast<const char*>(&value), sizeof(value));
  RETURN_IF_ERROR(BroadcastAs(smallest, {kOp, /*peer=*/0}));
  if (smallest.size() != sizeof(value)) {
    return absl::InternalError("AllReduceMin met another call of rank 0");
  }
  std::memcpy(&value, smallest.data(), sizeof(value));
  return value;
}

absl::Status HostControlChannel::Barrier() {
  RETURN_IF_ERROR(GatherAs("", WaitOp::kBarrier).status());
  std::string nothing;
  return BroadcastAs(nothing, {WaitOp::kBarrier, /*peer=*/0});
}

// Length first, then the text: the receiver cannot know how much will come.
absl::Status HostControlChannel::SendFar(int rank, absl::string_view message, WaitOp op) {
  while (!outgoing_.empty() &&
         (outgoing_.size() >= kMaxOutgoingPerRank * std::max<size_t>(far_ranks_.size(), 1))) {
    RETURN_IF_ERROR(endpoint_->WaitForTransfers({op}, outgoing_.front().transfers));
    outgoing_.pop_front();
  }
  Outgoing& out = outgoing_.emplace_back();
  out.length = message.size();
  out.text.assign(message.data(), message.size());
  ASSIGN_OR_RETURN(out.transfers.emplace_back(),
                   endpoint_->link().Send(rank, kControlTag, &out.length, sizeof(out.length)));
  if (out.length > 0) {
    ASSIGN_OR_RETURN(out.transfers.emplace_back(),
                     endpoint_->link().Send(rank, kControlTag, out.text.data(), out.length));
  }
  // Keep the queue short where that costs no waiting, which also lets the messages move on.
  while (!outgoing_.empty()) {
    for (const auto& transfer : outgoing_.front().transfers) {
      ASSIGN_OR_RETURN(const bool done, transfer->Test());
      if (!done) return absl::OkStatus();
    }
    outgoing_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status HostControlChannel::ReceiveFar(int rank, std::string& message, WaitReason reason) {
  reason.peer = rank;
  std::vector<std::unique_ptr<Transfer>> transfer(1);
  uint64_t length = 0;
  ASSIGN_OR_RETURN(transfer[0], endpoint_->link().Recv(rank, kControlTag, &length, sizeof(length)));
  RETURN_IF_ERROR(endpoint_->WaitForTransfers(reason, transfer));
  message.resize(length);
  if (length == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(transfer[0], endpoint_->link().Recv(rank, kControlTag, message.data(), length));
  return endpoint_->WaitForTransfers(reason, transfer);
}

}  // namespace heddle
