// The communicator of CPU ranks: through shared slots inside a node, by messages between nodes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/endpoint.h"
#include "parallel/host_group.h"
#include "parallel/shard_spec.h"
#include "parallel/slot_board.h"

namespace heddle {

// Sums take one pass ("everyone reads everything") where that is faster and two else ("each reduces
// a part, all collect"). Between nodes the owners of a part trade their node's rows, so that each
// element is still added up in rank order. All other operations between nodes are plain messages
// between all pairs.
class HostCommunicator : public Communicator {
 public:
  // `window_offset` is where the group's SlotBoard was formatted in this node's window; `tag` is
  // its own among all groups of any two members.
  HostCommunicator(std::shared_ptr<Endpoint> endpoint, HostGroup group, uint64_t window_offset,
                   int tag);

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  absl::Status AllReduce(void* data, int64_t count, DType dtype, ReduceOp op,
                         Stream& stream) override;
  absl::Status AllGatherV(const void* input, void* output, std::span<const int64_t> bytes_per_rank,
                          Stream& stream) override;
  absl::Status ReduceScatterV(const void* input, void* output,
                              std::span<const int64_t> count_per_rank, DType dtype,
                              Stream& stream) override;
  absl::Status AllToAllV(const void* input, std::span<const int64_t> send_bytes, void* output,
                         std::span<const int64_t> receive_bytes, Stream& stream) override;
  absl::Status Broadcast(void* data, int64_t bytes, int root, Stream& stream) override;
  absl::Status Send(const void* data, int64_t bytes, int peer, Stream& stream) override;
  absl::Status Recv(void* data, int64_t bytes, int peer, Stream& stream) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;

 private:
  using Counts = std::vector<int64_t>;

  void Enqueue(Stream& stream, std::function<absl::Status()> work);

  // What the stream runs. The sums are in host_all_reduce.cc.
  absl::Status ReduceInOnePass(float* data, int64_t count, ReduceOp op);
  absl::Status ReduceInTwoPasses(float* data, int64_t count, ReduceOp op);
  absl::Status ReduceOwnPart(uint64_t round, int64_t count, ReduceOp op);
  absl::Status TradeRows(const std::vector<Range>& shares);
  absl::Status TradeResults(const std::vector<Range>& shares, float* result);
  absl::Status GatherRows(const std::byte* input, std::byte* output, const Counts& bytes,
                          WaitOp op);
  absl::Status ScatterReduce(const float* input, float* output, const Counts& counts);
  absl::Status Trade(const std::byte* input, const Counts& send_bytes, std::byte* output,
                     const Counts& receive_bytes);
  absl::Status SendNow(const std::byte* data, int64_t bytes, int peer);
  absl::Status ReceiveNow(std::byte* data, int64_t bytes, int peer);

  // Up to here one pass, or one hop between nodes, is faster than two.
  static bool IsSmall(int64_t num_floats) { return num_floats <= 4096; }

  // Messages to and from group ranks; empty ones are left out on both sides.
  struct Message {
    int peer;
    void* data;
    int64_t bytes;
  };
  absl::Status Exchange(std::span<const Message> sends, std::span<const Message> receives,
                        WaitOp op);
  // Writes the `piece`-th piece of each member's segment of `input` for that member to read.
  void WriteSegments(uint64_t round, int64_t piece, const std::byte* input, const Counts& bytes);
  int64_t SegmentPieceBytes() const;

  const std::shared_ptr<Endpoint> endpoint_;
  const HostGroup group_;
  const int tag_;
  std::unique_ptr<SlotBoard> board_;  // null in a group of one, which has nobody to share with
  uint64_t next_round_ = 0;           // of the board
  std::vector<const float*> rows_;    // what each group rank contributes to a sum
  std::vector<float> incoming_;       // rows of other nodes
  std::vector<float> outgoing_;       // rows for other nodes
};

}  // namespace heddle
