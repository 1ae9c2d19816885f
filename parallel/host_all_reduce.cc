// The sums and maxima of HostCommunicator.
#include <algorithm>

#include "kernels/base/status_macros.h"
#include "parallel/host_communicator.h"
#include "parallel/host_reduce.h"

namespace heddle {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

}  // namespace

// Everyone reads everything, a piece behind what it writes.
absl::Status HostCommunicator::ReduceInOnePass(float* data, int64_t count, ReduceOp op) {
  const int64_t piece_floats = board_->slot_bytes() / sizeof(float);
  const int64_t num_pieces = (count + piece_floats - 1) / piece_floats;
  const auto floats_of = [&](int64_t t) {
    return std::min(piece_floats, count - t * piece_floats);
  };
  for (int64_t t = 0; t <= num_pieces; ++t) {
    const uint64_t round = next_round_ + t;
    if (t < num_pieces) {
      std::copy_n(data + t * piece_floats, floats_of(t), board_->slot_floats(rank(), round));
      board_->SayWritten(round);
    }
    if (t == 0) continue;
    RETURN_IF_ERROR(board_->AwaitWritten(round - 1, WaitOp::kAllReduce));
    for (int r = 0; r < size(); ++r) rows_[r] = board_->slot_floats(r, round - 1);
    ReduceInOrder(rows_, floats_of(t - 1), op, data + (t - 1) * piece_floats);
  }
  next_round_ += num_pieces;
  return absl::OkStatus();
}

// A pipeline over pieces: write t, reduce the own part of t - 1, collect all parts of t - 2. A
// member without a part need not see the others' pieces: the owners' results of t - 2 say that they
// have read its own.
absl::Status HostCommunicator::ReduceInTwoPasses(float* data, int64_t count, ReduceOp op) {
  const int64_t piece_floats = board_->slot_bytes() / sizeof(float);
  const int64_t num_pieces = (count + piece_floats - 1) / piece_floats;
  const auto floats_of = [&](int64_t t) {
    return std::min(piece_floats, count - t * piece_floats);
  };
  for (int64_t t = 0; t < num_pieces + 2; ++t) {
    const uint64_t round = next_round_ + t;
    if (t < num_pieces) {
      std::copy_n(data + t * piece_floats, floats_of(t),
                  board_->slot_floats(board_->self(), round));
      board_->SayWritten(round);
    }
    if (1 <= t && t <= num_pieces && board_->self() < group_.num_owners) {
      RETURN_IF_ERROR(board_->AwaitWritten(round - 1, WaitOp::kAllReduce));
      RETURN_IF_ERROR(ReduceOwnPart(round - 1, floats_of(t - 1), op));
      board_->SayReduced(round - 1);
    }
    if (t < 2) continue;
    float* const piece = data + (t - 2) * piece_floats;
    for (int owner = 0; owner < group_.num_owners; ++owner) {
      RETURN_IF_ERROR(board_->AwaitReduced(owner, round - 2, WaitOp::kAllReduce));
      const Range part = group_.PartOf(owner, floats_of(t - 2));
      std::copy_n(board_->result_floats(owner, round - 2), part.size(), piece + part.begin);
    }
  }
  next_round_ += num_pieces;
  return absl::OkStatus();
}

// Leaves this member's part of a piece of `count` floats in its result of the round.
absl::Status HostCommunicator::ReduceOwnPart(uint64_t round, int64_t count, ReduceOp op) {
  const Range part = group_.PartOf(board_->self(), count);
  const std::vector<int>& here = group_.nodes[group_.node];
  for (int local = 0; local < board_->num_members(); ++local) {
    rows_[here[local]] = board_->slot_floats(local, round) + part.begin;
  }
  float* const result = board_->result_floats(board_->self(), round);
  if (group_.one_node()) {
    ReduceInOrder(rows_, part.size(), op, result);
    return absl::OkStatus();
  }

  // The owners of this part on all nodes share it. Small: each reduces all of it, one hop. Else
  // each reduces a share and they trade results, two hops but fewer bytes.
  std::vector<Range> shares(group_.num_nodes(), Range{0, part.size()});
  if (!IsSmall(count)) {
    for (int node = 0; node < group_.num_nodes(); ++node) {
      shares[node] = SplitInBlocks(part.size(), kFloatsPerLine, group_.num_nodes(), node);
    }
  }
  RETURN_IF_ERROR(TradeRows(shares));
  const Range& own = shares[group_.node];
  ReduceInOrder(rows_, own.size(), op, result + own.begin);
  return IsSmall(count) ? absl::OkStatus() : TradeResults(shares, result);
}

// Before, rows_ holds this node's rows of the whole part; after, all members' rows of the own
// share.
absl::Status HostCommunicator::TradeRows(const std::vector<Range>& shares) {
  const std::vector<int>& here = group_.nodes[group_.node];
  const int64_t num_rows_here = static_cast<int64_t>(here.size());
  const Range& own = shares[group_.node];
  int64_t num_outgoing = 0;
  for (const Range& share : shares) num_outgoing += num_rows_here * share.size();
  outgoing_.resize(num_outgoing);
  incoming_.resize((size() - num_rows_here) * own.size());

  std::vector<Message> sends, receives;
  float* out = outgoing_.data();
  float* in = incoming_.data();
  for (int node = 0; node < group_.num_nodes(); ++node) {
    if (node == group_.node) continue;
    const std::vector<int>& there = group_.nodes[node];
    const Range& theirs = shares[node];
    const int peer = there[board_->self()];
    sends.push_back({peer, out, num_rows_here * theirs.size() * kFloatBytes});
    for (const int r : here) out = std::copy_n(rows_[r] + theirs.begin, theirs.size(), out);
    receives.push_back({peer, in, static_cast<int64_t>(there.size()) * own.size() * kFloatBytes});
    for (const int r : there) {
      rows_[r] = in;
      in += own.size();
    }
  }
  for (const int r : here) rows_[r] += own.begin;
  return Exchange(sends, receives, WaitOp::kAllReduce);
}

absl::Status HostCommunicator::TradeResults(const std::vector<Range>& shares, float* result) {
  const Range& own = shares[group_.node];
  std::vector<Message> sends, receives;
  for (int node = 0; node < group_.num_nodes(); ++node) {
    if (node == group_.node) continue;
    const int peer = group_.nodes[node][board_->self()];
    sends.push_back({peer, result + own.begin, own.size() * kFloatBytes});
    receives.push_back({peer, result + shares[node].begin, shares[node].size() * kFloatBytes});
  }
  return Exchange(sends, receives, WaitOp::kAllReduce);
}

}  // namespace heddle
