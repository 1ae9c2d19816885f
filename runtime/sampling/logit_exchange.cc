#include "runtime/sampling/logit_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

namespace heddle {
namespace {

// At least `bytes`, with room to grow so that steps of varying size do not allocate each time.
absl::Status Reserve(int64_t bytes, bool pinned, Backend& backend, DeviceBuffer& buffer) {
  if (static_cast<int64_t>(buffer.bytes()) >= bytes) return absl::OkStatus();
  const size_t wanted = static_cast<size_t>(bytes) + static_cast<size_t>(bytes) / 2;
  buffer = DeviceBuffer();
  ASSIGN_OR_RETURN(buffer, pinned ? backend.AllocatePinned(wanted) : backend.Allocate(wanted));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LogitExchange> LogitExchange::Create(std::vector<Range> vocab_shards,
                                                    Backend& backend, Communicator& communicator) {
  CHECK_EQ(static_cast<int>(vocab_shards.size()), communicator.size());
  int64_t next_id = 0;
  for (const Range& shard : vocab_shards) {
    CHECK(shard.begin == next_id && shard.end >= next_id) << shard.begin << ", " << shard.end;
    next_id = shard.end;
  }
  CHECK(next_id > 0);
  return LogitExchange(std::move(vocab_shards), backend, communicator);
}

absl::StatusOr<ConstMatrixView> LogitExchange::ToHost(ConstMatrixView logits, Stream& stream) {
  CHECK_EQ(logits.cols, local_ids().size());
  CHECK(logits.dtype == DType::kFloat32 && (logits.row_stride == logits.cols || logits.rows <= 1));
  if (backend_->kind() == DeviceKind::kCpu) {
    RETURN_IF_ERROR(stream.Synchronize());
    return logits;
  }
  const int64_t bytes = logits.rows * logits.cols * static_cast<int64_t>(sizeof(float));
  RETURN_IF_ERROR(Reserve(bytes, /*pinned=*/true, *backend_, host_logits_));
  RETURN_IF_ERROR(backend_->CopyAsync(host_logits_.data(), logits.data, bytes, stream));
  RETURN_IF_ERROR(stream.Synchronize());
  return FloatMatrix(host_logits_.as<const float>(), logits.rows, logits.cols);
}

absl::Status LogitExchange::ForEachRow(int64_t num_rows, absl::FunctionRef<void(int64_t)> body,
                                       Stream& stream) {
  if (backend_->kind() != DeviceKind::kCpu) {
    for (int64_t row = 0; row < num_rows; ++row) body(row);
    return absl::OkStatus();
  }
  CpuStream::From(stream).Enqueue([num_rows, body](CpuThreadPool& pool) {
    pool.ParallelFor(num_rows, body);
    return absl::OkStatus();
  });
  return stream.Synchronize();
}

absl::StatusOr<std::span<const std::byte>> LogitExchange::Gather(
    std::vector<std::byte> mine, std::span<const int64_t> bytes_per_rank, Stream& stream) {
  mine_ = std::move(mine);
  CHECK_EQ(static_cast<int64_t>(mine_.size()), bytes_per_rank[communicator_->rank()]);
  if (num_ranks() == 1) return std::span<const std::byte>(mine_);
  const int64_t total = std::accumulate(bytes_per_rank.begin(), bytes_per_rank.end(), int64_t{0});
  RETURN_IF_ERROR(Reserve(mine_.size(), /*pinned=*/false, *backend_, device_send_));
  RETURN_IF_ERROR(Reserve(total, /*pinned=*/false, *backend_, device_receive_));
  RETURN_IF_ERROR(Reserve(total, /*pinned=*/true, *backend_, host_exchange_));
  RETURN_IF_ERROR(backend_->CopyAsync(device_send_.data(), mine_.data(), mine_.size(), stream));
  RETURN_IF_ERROR(communicator_->AllGatherV(device_send_.data(), device_receive_.data(),
                                            bytes_per_rank, stream));
  RETURN_IF_ERROR(
      backend_->CopyAsync(host_exchange_.data(), device_receive_.data(), total, stream));
  RETURN_IF_ERROR(stream.Synchronize());
  return std::span(host_exchange_.as<const std::byte>(), static_cast<size_t>(total));
}

absl::StatusOr<ConstMatrixView> LogitExchange::GatherRows(ConstMatrixView logits,
                                                          std::span<const int64_t> rows,
                                                          Stream& stream) {
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  const auto shard_bytes = [](const Range& shard) {
    return shard.size() * static_cast<int64_t>(sizeof(float));
  };
  const int64_t own_bytes = shard_bytes(local_ids());
  std::vector<std::byte> mine(num_rows * own_bytes);
  for (int64_t i = 0; i < num_rows && own_bytes > 0; ++i) {
    std::memcpy(&mine[i * own_bytes], logits.Row<float>(rows[i]), own_bytes);
  }
  std::vector<int64_t> bytes_per_rank;
  for (const Range& shard : shards_) bytes_per_rank.push_back(num_rows * shard_bytes(shard));
  ASSIGN_OR_RETURN(const std::span<const std::byte> gathered,
                   Gather(std::move(mine), bytes_per_rank, stream));

  whole_rows_.resize(num_rows * vocab_size());
  const std::byte* source = gathered.data();
  for (const Range& shard : shards_) {
    if (shard.empty()) continue;
    for (int64_t i = 0; i < num_rows; ++i, source += shard_bytes(shard)) {
      std::memcpy(&whole_rows_[i * vocab_size() + shard.begin], source, shard_bytes(shard));
    }
  }
  return FloatMatrix(std::as_const(whole_rows_).data(), num_rows, vocab_size());
}

}  // namespace heddle
