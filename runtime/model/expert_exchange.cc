#include "runtime/model/expert_exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/memory/memory.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {
namespace {

constexpr size_t kWordBytes = sizeof(int32_t);
static_assert(sizeof(float) == kWordBytes);

size_t WordBytes(int64_t count) { return static_cast<size_t>(count) * kWordBytes; }

}  // namespace

ExpertExchange::ExpertExchange(std::vector<Range> experts, int64_t top_k, int64_t hidden_size,
                               int64_t max_received, Communicator& world, Backend& backend)
    : experts_(std::move(experts)),
      top_k_(top_k),
      hidden_size_(hidden_size),
      max_own_tokens_(std::max<int64_t>(1, max_received / std::ssize(experts_))),
      world_(world),
      backend_(backend) {}

absl::StatusOr<std::unique_ptr<ExpertExchange>> ExpertExchange::Create(
    std::vector<Range> experts, int64_t top_k, int64_t hidden_size, int64_t max_received,
    Communicator& world, Backend& backend) {
  const auto ranks = static_cast<int64_t>(experts.size());
  CHECK_EQ(ranks, world.size());
  std::unique_ptr<ExpertExchange> exchange = absl::WrapUnique(
      new ExpertExchange(std::move(experts), top_k, hidden_size, max_received, world, backend));
  const int64_t tokens = exchange->max_own_tokens_;
  const int64_t max_sent = tokens * std::min(ranks, top_k);
  const auto ints = [&backend](int64_t count) {
    return StepArray<int32_t>::Create(count, backend);
  };
  const auto rows = [&](int64_t count) { return Activation::Create(count, hidden_size, backend); };
  ASSIGN_OR_RETURN(exchange->host_ids_, backend.AllocatePinned(WordBytes(tokens * top_k)));
  ASSIGN_OR_RETURN(exchange->rows_, ints(max_sent));
  ASSIGN_OR_RETURN(exchange->entry_of_, ints(tokens * ranks));
  ASSIGN_OR_RETURN(exchange->counts_, ints(ranks));
  ASSIGN_OR_RETURN(exchange->received_counts_, backend.Allocate(WordBytes(ranks)));
  ASSIGN_OR_RETURN(exchange->host_counts_, backend.AllocatePinned(WordBytes(ranks)));
  ASSIGN_OR_RETURN(exchange->sent_rows_, rows(max_sent));
  ASSIGN_OR_RETURN(exchange->received_rows_, rows(tokens * ranks));
  ASSIGN_OR_RETURN(exchange->summands_, rows(tokens * ranks));
  ASSIGN_OR_RETURN(exchange->ones_, backend.Allocate(WordBytes(tokens * ranks)));
  const std::vector<float> ones(tokens * ranks, 1.0f);
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend.CreateStream());
  RETURN_IF_ERROR(
      backend.CopyAsync(exchange->ones_.data(), ones.data(), WordBytes(tokens * ranks), *stream));
  RETURN_IF_ERROR(stream->Synchronize());
  return exchange;
}

int64_t ExpertExchange::Sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

std::vector<int64_t> ExpertExchange::Bytes(const std::vector<int64_t>& counts) const {
  std::vector<int64_t> bytes;
  for (const int64_t count : counts) {
    bytes.push_back(count * hidden_size_ * static_cast<int64_t>(sizeof(float)));
  }
  return bytes;
}

void ExpertExchange::Deal(const int32_t* expert_ids, int64_t num_tokens) {
  const auto ranks = static_cast<int64_t>(experts_.size());
  sent_.assign(ranks, 0);
  int32_t entry = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      const int32_t* ids = expert_ids + token * top_k_;
      const bool goes =
          std::any_of(ids, ids + top_k_, [&](int32_t id) { return experts_[rank].Contains(id); });
      entry_of_.host()[token * ranks + rank] = goes ? entry : -1;
      if (!goes) continue;
      rows_.host()[entry++] = static_cast<int32_t>(token);
      ++sent_[rank];
    }
    counts_.host()[rank] = static_cast<int32_t>(sent_[rank]);
  }
}

absl::StatusOr<ConstMatrixView> ExpertExchange::Send(ConstMatrixView x, const int32_t* expert_ids,
                                                     Stream& stream) {
  CHECK_LE(x.rows, max_own_tokens_);
  const auto ranks = static_cast<int64_t>(experts_.size());
  RETURN_IF_ERROR(
      backend_.CopyAsync(host_ids_.data(), expert_ids, WordBytes(x.rows * top_k_), stream));
  RETURN_IF_ERROR(stream.Synchronize());
  Deal(host_ids_.as<const int32_t>(), x.rows);

  const int64_t num_sent = Sum(sent_);
  RETURN_IF_ERROR(counts_.Upload(ranks, backend_, stream));
  RETURN_IF_ERROR(rows_.Upload(num_sent, backend_, stream));
  RETURN_IF_ERROR(entry_of_.Upload(x.rows * ranks, backend_, stream));
  const std::vector<int64_t> one_word(ranks, static_cast<int64_t>(kWordBytes));
  RETURN_IF_ERROR(
      world_.AllToAllV(counts_.device(), one_word, received_counts_.data(), one_word, stream));
  RETURN_IF_ERROR(
      backend_.CopyAsync(host_counts_.data(), received_counts_.data(), WordBytes(ranks), stream));
  const MatrixView sent = sent_rows_.Rows(num_sent);
  RETURN_IF_ERROR(
      backend_.kernels().gather_rows({.x = x, .rows = rows_.device(), .out = sent}, stream));
  RETURN_IF_ERROR(stream.Synchronize());

  const auto* counts = host_counts_.as<const int32_t>();
  received_.assign(counts, counts + ranks);
  const MatrixView received = received_rows_.Rows(Sum(received_));
  RETURN_IF_ERROR(
      world_.AllToAllV(sent.data, Bytes(sent_), received.data, Bytes(received_), stream));
  return ConstMatrixView(received);
}

absl::Status ExpertExchange::Return(bool add, MatrixView out, Stream& stream) {
  const MatrixView returned = sent_rows_.Rows(Sum(sent_));
  RETURN_IF_ERROR(world_.AllToAllV(summands_.Rows(Sum(received_)).data, Bytes(received_),
                                   returned.data, Bytes(sent_), stream));
  return backend_.kernels().expert_combine({.y = returned,
                                            .entry_of = entry_of_.device(),
                                            .weights = ones_.as<const float>(),
                                            .top_k = static_cast<int64_t>(experts_.size()),
                                            .add = add,
                                            .out = out},
                                           stream);
}

}  // namespace heddle
