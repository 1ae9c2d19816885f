// The tensor plane: collectives on device memory, ordered on a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"

namespace heddle {

class KvGrid;

enum class ReduceOp : uint8_t {
  kSum,
  kMax,  // a NaN on any rank gives NaN
};

// The ranks of a KvGrid that a communicator joins.
enum class GridAxis : uint8_t {
  kHeadShard,  // same stripe, all head shards
  kStripe,     // same head shard, all stripes: a stripe group
};

// A group of ranks that move tensors. Owned by one rank and used by its worker thread only. All
// members make the same calls in the same order with agreeing counts; Send/Recv concern the two
// peers alone.
//
// Ops are enqueued: the returned Status covers the arguments, a failed peer surfaces when the
// stream is synchronised. Counts are host values and are copied; buffers must stay valid until the
// stream has passed. Zero counts are legal and pointers may then be null. All waits end with the
// job's first error once any rank aborts (control_channel.h).
class Communicator {
 public:
  virtual ~Communicator() = default;

  // Of this rank inside the group.
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // In place over data[0, count). Float32 everywhere; other types where the back end has them
  // (Unimplemented else). Summed in rank order: all ranks are left with identical bits.
  virtual absl::Status AllReduce(void* data, int64_t count, DType dtype, ReduceOp op,
                                 Stream& stream) = 0;

  // Rank r contributes bytes_per_rank[r] bytes; everyone receives all, in rank order, in `output`.
  // `input` may be this rank's own place in `output`.
  virtual absl::Status AllGatherV(const void* input, void* output,
                                  std::span<const int64_t> bytes_per_rank, Stream& stream) = 0;

  // `input` holds size() segments of count_per_rank[r] elements; rank r receives the sum of all
  // ranks' segments r, added in rank order. `output` may be this rank's segment of `input`.
  virtual absl::Status ReduceScatterV(const void* input, void* output,
                                      std::span<const int64_t> count_per_rank, DType dtype,
                                      Stream& stream) = 0;

  // Sends the r-th segment of `input` to rank r and receives the segments of all ranks in rank
  // order. send_bytes[r] here equals receive_bytes[this rank] on rank r. No overlap of buffers.
  virtual absl::Status AllToAllV(const void* input, std::span<const int64_t> send_bytes,
                                 void* output, std::span<const int64_t> receive_bytes,
                                 Stream& stream) = 0;

  virtual absl::Status Broadcast(void* data, int64_t bytes, int root, Stream& stream) = 0;

  // Send may wait for the matching Recv: of two ranks that exchange, one receives first.
  virtual absl::Status Send(const void* data, int64_t bytes, int peer, Stream& stream) = 0;
  virtual absl::Status Recv(void* data, int64_t bytes, int peer, Stream& stream) = 0;

  // Collective on the host, while no op of this communicator is pending on a stream: ranks of equal
  // `color` form a group, ordered by `key`, then by rank. The group lives within the world; a world
  // has room for a dozen groups of its own size.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) = 0;

  // Split along one axis of the grid, whose ranks are this communicator's.
  absl::StatusOr<std::unique_ptr<Communicator>> SplitAlong(const KvGrid& grid, GridAxis axis);
};

}  // namespace heddle
