// Moves logits and what was computed from them between the ranks that share a vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "parallel/communicator.h"
#include "parallel/shard_spec.h"

namespace heddle {

// Sampling computes on the host; this class brings its operands there. Owned by a Sampler or a
// PromptScorer. Every call that takes a stream synchronises it; those named Gather are collective.
class LogitExchange {
 public:
  // `vocab_shards` [ranks] ascend without gaps from id 0. The references outlive the exchange.
  static absl::StatusOr<LogitExchange> Create(std::vector<Range> vocab_shards, Backend& backend,
                                              Communicator& communicator);

  int num_ranks() const { return communicator_->size(); }
  const std::vector<Range>& shards() const { return shards_; }
  const Range& local_ids() const { return shards_[communicator_->rank()]; }
  int64_t vocab_size() const { return shards_.back().end; }

  // The local logits [rows, local vocabulary] in host memory, until the next call.
  absl::StatusOr<ConstMatrixView> ToHost(ConstMatrixView logits, Stream& stream);

  // Runs `body` for each row, spread over the rank's threads where the device has some.
  absl::Status ForEachRow(int64_t num_rows, absl::FunctionRef<void(int64_t row)> body,
                          Stream& stream);

  // All ranks' bytes in rank order, until the next call. bytes_per_rank[own rank] is mine.size().
  absl::StatusOr<std::span<const std::byte>> Gather(std::vector<std::byte> mine,
                                                    std::span<const int64_t> bytes_per_rank,
                                                    Stream& stream);

  // Whole rows [rows.size(), vocab_size] of the logits, until the next call. `rows` are those of
  // `logits`, which must be what the last ToHost returned; at most kMaxWholeRows at once keep
  // memory bounded.
  static constexpr int64_t kMaxWholeRows = 16;
  absl::StatusOr<ConstMatrixView> GatherRows(ConstMatrixView logits, std::span<const int64_t> rows,
                                             Stream& stream);

 private:
  LogitExchange(std::vector<Range> shards, Backend& backend, Communicator& communicator)
      : shards_(std::move(shards)), backend_(&backend), communicator_(&communicator) {}

  std::vector<Range> shards_;
  Backend* backend_;
  Communicator* communicator_;
  // Grown on demand, kept for the next step.
  DeviceBuffer host_logits_;
  DeviceBuffer host_exchange_, device_send_, device_receive_;
  std::vector<std::byte> mine_;
  std::vector<float> whole_rows_;
};

}  // namespace heddle
