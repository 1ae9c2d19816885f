#include "parallel/host_communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/host_reduce.h"
#include "parallel/shard_spec.h"

namespace heddle {
namespace {

// Up to here one pass, or one hop between nodes, is faster than two.
constexpr int64_t kSmallBytes = 16 << 10;
constexpr size_t kSlotBytes = 32 << 10;
constexpr size_t kSlotBytesAcrossNodes = 64 << 10;
constexpr int64_t kFloatsPerLine = 16;

std::vector<int64_t> OffsetsOf(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> offsets(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), int64_t{0});
  return offsets;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The bytes of the `piece`-th piece of a row.
int64_t PieceBytes(int64_t row_bytes, int64_t piece, int64_t piece_bytes) {
  return std::clamp<int64_t>(row_bytes - piece * piece_bytes, 0, piece_bytes);
}

void CopyBytes(void* target, const void* source, int64_t bytes) {
  if (bytes > 0 && target != source) std::memcpy(target, source, bytes);
}

absl::Status CheckCounts(absl::string_view op, std::span<const int64_t> counts, int size) {
  if (static_cast<int>(counts.size()) != size) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", counts.size(), " counts were given for ", size, " ranks"));
  }
  for (const int64_t count : counts) {
    if (count < 0) return absl::InvalidArgumentError(absl::StrCat(op, ": a count is ", count));
  }
  return absl::OkStatus();
}

absl::Status CheckDType(absl::string_view op, DType dtype) {
  if (dtype == DType::kFloat32) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(op, " on CPU ranks adds float32, not ", DTypeName(dtype)));
}

absl::Status CheckPeer(absl::string_view op, int peer, int size, int self) {
  if (0 <= peer && peer < size && peer != self) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(op, ": rank ", peer, " is no other rank of a group of ", size));
}

}  // namespace

HostGroup::HostGroup(const std::vector<RankPlace>& places, std::vector<int> members_in, int self)
    : members(std::move(members_in)) {
  std::vector<int> world_nodes;  // of each entry of `nodes`
  for (int r = 0; r < size(); ++r) {
    const int world_node = places[members[r]].node;
    const auto known = std::find(world_nodes.begin(), world_nodes.end(), world_node);
    const size_t index = known - world_nodes.begin();
    if (known == world_nodes.end()) {
      world_nodes.push_back(world_node);
      nodes.emplace_back();
    }
    nodes[index].push_back(r);
    if (members[r] == self) {
      rank = r;
      node = static_cast<int>(index);
    }
  }
  num_owners = size();
  for (const std::vector<int>& on_node : nodes) {
    num_owners = std::min(num_owners, static_cast<int>(on_node.size()));
  }
}

size_t HostGroup::SlotBytes() const { return one_node() ? kSlotBytes : kSlotBytesAcrossNodes; }

size_t HostGroup::ResultBytes() const {
  const int64_t floats = SlotBytes() / sizeof(float);
  return SplitInBlocks(floats, kFloatsPerLine, num_owners, 0).size() * sizeof(float);
}

size_t HostGroup::WindowBytes(int of_node) const {
  if (size() == 1) return 0;  // It has nobody to share anything with.
  return SlotBoard::BytesFor(static_cast<int>(nodes[of_node].size()), SlotBytes(), ResultBytes());
}

namespace {

std::vector<int> MembersOnNode(const HostGroup& group) {
  std::vector<int> world_ranks;
  for (const int r : group.nodes[group.node]) world_ranks.push_back(group.members[r]);
  return world_ranks;
}

}  // namespace

HostCommunicator::HostCommunicator(std::shared_ptr<Endpoint> endpoint, HostGroup group,
                                   uint64_t window_offset, int tag)
    : endpoint_(std::move(endpoint)), group_(std::move(group)), tag_(tag), rows_(size()) {
  if (size() == 1) return;
  board_ = std::make_unique<SlotBoard>(endpoint_, window_offset, MembersOnNode(group_),
                                       group_.SlotBytes(), group_.ResultBytes());
}

void HostCommunicator::Enqueue(Stream& stream, std::function<absl::Status()> work) {
  CpuStream::From(stream).Enqueue([this, work = std::move(work)](CpuThreadPool&) {
    const absl::Status status = work();
    if (status.ok()) endpoint_->ReportProgress();
    return status;
  });
}

// ---- Sums and maxima

absl::Status HostCommunicator::AllReduce(void* data, int64_t count, DType dtype, ReduceOp op,
                                         Stream& stream) {
  RETURN_IF_ERROR(CheckDType("AllReduce", dtype));
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat("AllReduce of ", count));
  if (size() == 1 || count == 0) return absl::OkStatus();
  auto* floats = static_cast<float*>(data);
  const bool one_pass =
      group_.one_node() && (size() == 2 || count * int64_t{sizeof(float)} <= kSmallBytes);
  Enqueue(stream, [this, floats, count, op, one_pass] {
    return one_pass ? ReduceInOnePass(floats, count, op) : ReduceInTwoPasses(floats, count, op);
  });
  return absl::OkStatus();
}

absl::Status HostCommunicator::ReduceInOnePass(float* data, int64_t count, ReduceOp op) {
  const int64_t piece_floats = board_->slot_bytes() / sizeof(float);
  const int64_t num_pieces = CeilDiv(count, piece_floats);
  for (int64_t t = 0; t <= num_pieces; ++t) {
    if (t < num_pieces) {
      const int64_t begin = t * piece_floats;
      const int64_t n = std::min(piece_floats, count - begin);
      CopyBytes(board_->slot(rank(), next_round_ + t), data + begin, n * sizeof(float));
      board_->SayWritten(next_round_ + t);
    }
    if (t == 0) continue;
    const uint64_t round = next_round_ + t - 1;
    RETURN_IF_ERROR(board_->AwaitWritten(round, WaitOp::kAllReduce));
    const int64_t begin = (t - 1) * piece_floats;
    for (int r = 0; r < size(); ++r) {
      rows_[r] = reinterpret_cast<const float*>(board_->slot(r, round));
    }
    ReduceInOrder(rows_, std::min(piece_floats, count - begin), op, data + begin);
  }
  next_round_ += num_pieces;
  return absl::OkStatus();
}

// A pipeline over pieces: write t, reduce the own part of t - 1, collect all parts of t - 2.
absl::Status HostCommunicator::ReduceInTwoPasses(float* data, int64_t count, ReduceOp op) {
  const int64_t piece_floats = board_->slot_bytes() / sizeof(float);
  const int64_t num_pieces = CeilDiv(count, piece_floats);
  const auto floats_of = [&](int64_t t) {
    return std::min(piece_floats, count - t * piece_floats);
  };
  for (int64_t t = 0; t < num_pieces + 2; ++t) {
    const uint64_t round = next_round_ + t;
    if (t < num_pieces) {
      CopyBytes(board_->slot(board_->self(), round), data + t * piece_floats,
                floats_of(t) * sizeof(float));
      board_->SayWritten(round);
    }
    if (1 <= t && t <= num_pieces) {
      RETURN_IF_ERROR(board_->AwaitWritten(round - 1, WaitOp::kAllReduce));
      RETURN_IF_ERROR(ReducePart(round - 1, floats_of(t - 1), op));
    }
    if (2 <= t) {
      for (int owner = 0; owner < group_.num_owners; ++owner) {
        RETURN_IF_ERROR(board_->AwaitReduced(owner, round - 2, WaitOp::kAllReduce));
        const Range part =
            SplitInBlocks(floats_of(t - 2), kFloatsPerLine, group_.num_owners, owner);
        CopyBytes(data + (t - 2) * piece_floats + part.begin, board_->result(owner, round - 2),
                  part.size() * sizeof(float));
      }
    }
  }
  next_round_ += num_pieces;
  return absl::OkStatus();
}

// Reduces this member's part of a piece of `count` floats into its result of the round.
absl::Status HostCommunicator::ReducePart(uint64_t round, int64_t count, ReduceOp op) {
  if (board_->self() >= group_.num_owners) return absl::OkStatus();
  const Range part = SplitInBlocks(count, kFloatsPerLine, group_.num_owners, board_->self());
  if (!group_.one_node()) {
    const bool small = count * int64_t{sizeof(float)} <= kSmallBytes;
    RETURN_IF_ERROR(ReduceAcrossNodes(round, part, small, op));
  } else {
    for (int r = 0; r < size(); ++r) {
      rows_[r] = reinterpret_cast<const float*>(board_->slot(r, round)) + part.begin;
    }
    ReduceInOrder(rows_, part.size(), op,
                  reinterpret_cast<float*>(board_->result(board_->self(), round)));
  }
  board_->SayReduced(round);
  return absl::OkStatus();
}

// The owners of `part` on all nodes trade rows. Small: each gets all rows and reduces the whole
// part, one hop. Else each reduces its node's share of the part and they trade results, two hops.
absl::Status HostCommunicator::ReduceAcrossNodes(uint64_t round, const Range& part, bool small,
                                                 ReduceOp op) {
  const int num_nodes = group_.num_nodes();
  const auto share_of = [&](int node) {
    return small ? Range{0, part.size()}
                 : SplitInBlocks(part.size(), kFloatsPerLine, num_nodes, node);
  };
  const auto owner_on = [&](int node) { return group_.nodes[node][board_->self()]; };
  const Range own_share = share_of(group_.node);
  const int64_t num_own_rows = board_->num_members();

  // Rows of other nodes, [their members, own_share] each, and the own rows for them.
  scratch_.resize((size() - num_own_rows) * own_share.size());
  outgoing_.resize(num_own_rows * part.size() * (small ? 1 : num_nodes));
  std::vector<Message> sends, receives;
  float* incoming = scratch_.data();
  float* packed = outgoing_.data();
  for (int local = 0; local < num_own_rows; ++local) {
    const auto* piece = reinterpret_cast<const float*>(board_->slot(local, round)) + part.begin;
    rows_[group_.nodes[group_.node][local]] = piece + own_share.begin;
    if (small) std::copy_n(piece, part.size(), packed + local * part.size());
  }
  for (int node = 0; node < num_nodes; ++node) {
    if (node == group_.node) continue;
    float* const first_row = incoming;
    for (const int r : group_.nodes[node]) {
      rows_[r] = incoming;
      incoming += own_share.size();
    }
    receives.push_back(
        {owner_on(node), first_row, (incoming - first_row) * static_cast<int64_t>(sizeof(float))});
    const Range share = share_of(node);
    if (!small) {
      for (int local = 0; local < num_own_rows; ++local) {
        const auto* piece = reinterpret_cast<const float*>(board_->slot(local, round)) + part.begin;
        std::copy_n(piece + share.begin, share.size(), packed + local * share.size());
      }
    }
    const int64_t floats = num_own_rows * share.size();
    sends.push_back({owner_on(node), packed, floats * static_cast<int64_t>(sizeof(float))});
    if (!small) packed += floats;
  }
  RETURN_IF_ERROR(Exchange(sends, receives, WaitOp::kAllReduce));

  auto* result = reinterpret_cast<float*>(board_->result(board_->self(), round));
  ReduceInOrder(rows_, own_share.size(), op, result + own_share.begin);
  if (small) return absl::OkStatus();
  sends.clear();
  receives.clear();
  for (int node = 0; node < num_nodes; ++node) {
    if (node == group_.node) continue;
    const Range share = share_of(node);
    sends.push_back({owner_on(node), result + own_share.begin,
                     own_share.size() * static_cast<int64_t>(sizeof(float))});
    receives.push_back(
        {owner_on(node), result + share.begin, share.size() * static_cast<int64_t>(sizeof(float))});
  }
  return Exchange(sends, receives, WaitOp::kAllReduce);
}

absl::Status HostCommunicator::ReduceScatterV(const void* input, void* output,
                                              std::span<const int64_t> count_per_rank, DType dtype,
                                              Stream& stream) {
  RETURN_IF_ERROR(CheckDType("ReduceScatterV", dtype));
  RETURN_IF_ERROR(CheckCounts("ReduceScatterV", count_per_rank, size()));
  Enqueue(
      stream, [this, input, output, counts = Counts(count_per_rank.begin(), count_per_rank.end())] {
        return ScatterReduce(static_cast<const float*>(input), static_cast<float*>(output), counts);
      });
  return absl::OkStatus();
}

absl::Status HostCommunicator::ScatterReduce(const float* input, float* output,
                                             const Counts& counts) {
  const int64_t own_count = counts[rank()];
  const float* own_segment = input + OffsetsOf(counts)[rank()];
  if (size() == 1) {
    CopyBytes(output, input, own_count * sizeof(float));
    return absl::OkStatus();
  }
  if (!group_.one_node()) {
    scratch_.resize(own_count * size());
    std::vector<Message> sends, receives;
    const Counts offsets = OffsetsOf(counts);
    for (int r = 0; r < size(); ++r) {
      rows_[r] = r == rank() ? own_segment : scratch_.data() + r * own_count;
      if (r == rank()) continue;
      sends.push_back({r, const_cast<float*>(input) + offsets[r],
                       counts[r] * static_cast<int64_t>(sizeof(float))});
      receives.push_back(
          {r, scratch_.data() + r * own_count, own_count * static_cast<int64_t>(sizeof(float))});
    }
    RETURN_IF_ERROR(Exchange(sends, receives, WaitOp::kReduceScatter));
    ReduceInOrder(rows_, own_count, ReduceOp::kSum, output);
    return absl::OkStatus();
  }
  Counts bytes;
  for (const int64_t count : counts) bytes.push_back(count * sizeof(float));
  const int64_t piece_bytes = SegmentPieceBytes();
  const int64_t piece_floats = piece_bytes / sizeof(float);
  const int64_t num_pieces = CeilDiv(*std::max_element(bytes.begin(), bytes.end()), piece_bytes);
  const auto* input_bytes = reinterpret_cast<const std::byte*>(input);
  for (int64_t t = 0; t <= num_pieces; ++t) {
    if (t < num_pieces) WriteSegments(next_round_ + t, t, input_bytes, bytes);
    if (t == 0) continue;
    const uint64_t round = next_round_ + t - 1;
    RETURN_IF_ERROR(board_->AwaitWritten(round, WaitOp::kReduceScatter));
    const int64_t begin = (t - 1) * piece_floats;
    for (int r = 0; r < size(); ++r) {
      rows_[r] =
          r == rank()
              ? own_segment + begin
              : reinterpret_cast<const float*>(board_->slot(r, round) + rank() * piece_bytes);
    }
    const int64_t n = std::clamp<int64_t>(own_count - begin, 0, piece_floats);
    if (n > 0) ReduceInOrder(rows_, n, ReduceOp::kSum, output + begin);
  }
  next_round_ += num_pieces;
  return absl::OkStatus();
}

// ---- Moves

int64_t HostCommunicator::SegmentPieceBytes() const {
  constexpr int64_t kLine = kFloatsPerLine * sizeof(float);
  return std::max<int64_t>(board_->slot_bytes() / size() / kLine * kLine, kLine);
}

void HostCommunicator::WriteSegments(uint64_t round, int64_t piece, const std::byte* input,
                                     const Counts& bytes) {
  const int64_t piece_bytes = SegmentPieceBytes();
  std::byte* const slot = board_->slot(rank(), round);
  int64_t segment = 0;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) {
      CopyBytes(slot + r * piece_bytes, input + segment + piece * piece_bytes,
                PieceBytes(bytes[r], piece, piece_bytes));
    }
    segment += bytes[r];
  }
  board_->SayWritten(round);
}

absl::Status HostCommunicator::AllGatherV(const void* input, void* output,
                                          std::span<const int64_t> bytes_per_rank, Stream& stream) {
  RETURN_IF_ERROR(CheckCounts("AllGatherV", bytes_per_rank, size()));
  Enqueue(stream,
          [this, input, output, bytes = Counts(bytes_per_rank.begin(), bytes_per_rank.end())] {
            return GatherRows(static_cast<const std::byte*>(input), static_cast<std::byte*>(output),
                              bytes, WaitOp::kAllGather);
          });
  return absl::OkStatus();
}

absl::Status HostCommunicator::Broadcast(void* data, int64_t bytes, int root, Stream& stream) {
  if (root < 0 || root >= size() || bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Broadcast of ", bytes, " bytes from rank ", root, " of ", size()));
  }
  // A gather to which only the root contributes.
  Counts rows(size(), 0);
  rows[root] = bytes;
  Enqueue(stream, [this, data, rows = std::move(rows)] {
    return GatherRows(static_cast<const std::byte*>(data), static_cast<std::byte*>(data), rows,
                      WaitOp::kBroadcast);
  });
  return absl::OkStatus();
}

absl::Status HostCommunicator::GatherRows(const std::byte* input, std::byte* output,
                                          const Counts& bytes, WaitOp op) {
  const Counts offsets = OffsetsOf(bytes);
  CopyBytes(output + offsets[rank()], input, bytes[rank()]);
  if (size() == 1) return absl::OkStatus();
  if (!group_.one_node()) {
    std::vector<Message> sends, receives;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sends.push_back({r, output + offsets[rank()], bytes[rank()]});
      receives.push_back({r, output + offsets[r], bytes[r]});
    }
    return Exchange(sends, receives, op);
  }
  const int64_t piece_bytes = board_->slot_bytes();
  const int64_t num_pieces = CeilDiv(*std::max_element(bytes.begin(), bytes.end()), piece_bytes);
  for (int64_t t = 0; t <= num_pieces; ++t) {
    if (t < num_pieces) {
      CopyBytes(board_->slot(rank(), next_round_ + t), output + offsets[rank()] + t * piece_bytes,
                PieceBytes(bytes[rank()], t, piece_bytes));
      board_->SayWritten(next_round_ + t);
    }
    if (t == 0) continue;
    const uint64_t round = next_round_ + t - 1;
    RETURN_IF_ERROR(board_->AwaitWritten(round, op));
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      CopyBytes(output + offsets[r] + (t - 1) * piece_bytes, board_->slot(r, round),
                PieceBytes(bytes[r], t - 1, piece_bytes));
    }
  }
  next_round_ += num_pieces;
  return absl::OkStatus();
}

absl::Status HostCommunicator::AllToAllV(const void* input, std::span<const int64_t> send_bytes,
                                         void* output, std::span<const int64_t> receive_bytes,
                                         Stream& stream) {
  RETURN_IF_ERROR(CheckCounts("AllToAllV", send_bytes, size()));
  RETURN_IF_ERROR(CheckCounts("AllToAllV", receive_bytes, size()));
  if (send_bytes[rank()] != receive_bytes[rank()]) {
    return absl::InvalidArgumentError(absl::StrCat("AllToAllV: rank ", rank(), " sends itself ",
                                                   send_bytes[rank()], " bytes but receives ",
                                                   receive_bytes[rank()]));
  }
  Enqueue(stream, [this, input, output, to = Counts(send_bytes.begin(), send_bytes.end()),
                   from = Counts(receive_bytes.begin(), receive_bytes.end())] {
    return Trade(static_cast<const std::byte*>(input), to, static_cast<std::byte*>(output), from);
  });
  return absl::OkStatus();
}

absl::Status HostCommunicator::Trade(const std::byte* input, const Counts& send_bytes,
                                     std::byte* output, const Counts& receive_bytes) {
  const Counts from = OffsetsOf(send_bytes);
  const Counts to = OffsetsOf(receive_bytes);
  CopyBytes(output + to[rank()], input + from[rank()], send_bytes[rank()]);
  if (size() == 1) return absl::OkStatus();
  if (!group_.one_node()) {
    std::vector<Message> sends, receives;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sends.push_back({r, const_cast<std::byte*>(input) + from[r], send_bytes[r]});
      receives.push_back({r, output + to[r], receive_bytes[r]});
    }
    return Exchange(sends, receives, WaitOp::kAllToAll);
  }
  // No rank knows what others send each other, so each notes beside its first piece how many
  // pieces it needs; the group goes on as long as any member does.
  const int64_t piece_bytes = SegmentPieceBytes();
  int64_t own_pieces = 1;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) own_pieces = std::max(own_pieces, CeilDiv(send_bytes[r], piece_bytes));
  }
  board_->note(rank(), next_round_) = own_pieces;
  WriteSegments(next_round_, 0, input, send_bytes);
  int64_t num_pieces = 1;
  for (int64_t t = 0; t < num_pieces; ++t) {
    const uint64_t round = next_round_ + t;
    RETURN_IF_ERROR(board_->AwaitWritten(round, WaitOp::kAllToAll));
    if (t == 0) {
      for (int r = 0; r < size(); ++r) {
        num_pieces = std::max(num_pieces, static_cast<int64_t>(board_->note(r, round)));
      }
    }
    if (t + 1 < num_pieces) WriteSegments(round + 1, t + 1, input, send_bytes);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      CopyBytes(output + to[r] + t * piece_bytes, board_->slot(r, round) + rank() * piece_bytes,
                PieceBytes(receive_bytes[r], t, piece_bytes));
    }
  }
  next_round_ += num_pieces;
  return absl::OkStatus();
}

absl::Status HostCommunicator::Send(const void* data, int64_t bytes, int peer, Stream& stream) {
  RETURN_IF_ERROR(CheckPeer("Send", peer, size(), rank()));
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Send of ", bytes, " bytes"));
  Enqueue(stream, [this, data, bytes, peer] {
    return SendNow(static_cast<const std::byte*>(data), bytes, peer);
  });
  return absl::OkStatus();
}

absl::Status HostCommunicator::Recv(void* data, int64_t bytes, int peer, Stream& stream) {
  RETURN_IF_ERROR(CheckPeer("Recv", peer, size(), rank()));
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("Recv of ", bytes, " bytes"));
  Enqueue(stream, [this, data, bytes, peer] {
    return ReceiveNow(static_cast<std::byte*>(data), bytes, peer);
  });
  return absl::OkStatus();
}

absl::Status HostCommunicator::SendNow(const std::byte* data, int64_t bytes, int peer) {
  const std::vector<int>& here = group_.nodes[group_.node];
  const auto member = std::find(here.begin(), here.end(), peer);
  if (member == here.end()) {
    const Message message = {peer, const_cast<std::byte*>(data), bytes};
    return Exchange({&message, 1}, {}, WaitOp::kSend);
  }
  const int64_t piece_bytes = board_->slot_bytes();
  for (int64_t begin = 0; begin < bytes; begin += piece_bytes) {
    CopyBytes(board_->outbox(board_->self()), data + begin, std::min(piece_bytes, bytes - begin));
    RETURN_IF_ERROR(board_->Post(static_cast<int>(member - here.begin())));
  }
  return absl::OkStatus();
}

absl::Status HostCommunicator::ReceiveNow(std::byte* data, int64_t bytes, int peer) {
  const std::vector<int>& here = group_.nodes[group_.node];
  const auto member = std::find(here.begin(), here.end(), peer);
  if (member == here.end()) {
    const Message message = {peer, data, bytes};
    return Exchange({}, {&message, 1}, WaitOp::kRecv);
  }
  const int sender = static_cast<int>(member - here.begin());
  const int64_t piece_bytes = board_->slot_bytes();
  for (int64_t begin = 0; begin < bytes; begin += piece_bytes) {
    RETURN_IF_ERROR(board_->AwaitPost(sender));
    CopyBytes(data + begin, board_->outbox(sender), std::min(piece_bytes, bytes - begin));
    board_->Taken(sender);
  }
  return absl::OkStatus();
}

absl::Status HostCommunicator::Exchange(std::span<const Message> sends,
                                        std::span<const Message> receives, WaitOp op) {
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (const Message& message : receives) {
    if (message.bytes == 0) continue;
    ASSIGN_OR_RETURN(
        transfers.emplace_back(),
        endpoint_->link().Recv(group_.members[message.peer], tag_, message.data, message.bytes));
  }
  for (const Message& message : sends) {
    if (message.bytes == 0) continue;
    ASSIGN_OR_RETURN(
        transfers.emplace_back(),
        endpoint_->link().Send(group_.members[message.peer], tag_, message.data, message.bytes));
  }
  const int peer = receives.size() == 1 ? group_.members[receives[0].peer] : -1;
  return endpoint_->WaitForTransfers({op, peer}, transfers);
}

// ---- Split

absl::StatusOr<std::unique_ptr<Communicator>> HostCommunicator::Split(int color, int key) {
  struct Wish {
    int color;
    int key;
    int next_tag;
  };
  const auto gather = [&](const void* own, void* all, int64_t bytes) {
    return GatherRows(static_cast<const std::byte*>(own), static_cast<std::byte*>(all),
                      Counts(size(), bytes), WaitOp::kSplit);
  };
  const Wish wish = {color, key, endpoint_->next_tag()};
  std::vector<Wish> wishes(size());
  RETURN_IF_ERROR(gather(&wish, wishes.data(), sizeof(Wish)));

  std::vector<int> parent_ranks;
  int tag = 0;
  for (int r = 0; r < size(); ++r) {
    tag = std::max(tag, wishes[r].next_tag);
    if (wishes[r].color == color) parent_ranks.push_back(r);
  }
  endpoint_->set_next_tag(tag + 1);
  std::stable_sort(parent_ranks.begin(), parent_ranks.end(),
                   [&](int a, int b) { return wishes[a].key < wishes[b].key; });
  std::vector<int> members;
  for (const int r : parent_ranks) members.push_back(group_.members[r]);
  HostGroup group(endpoint_->places(), std::move(members), endpoint_->rank());

  // The group's first member on each node makes room for the others; all learn whether all could.
  constexpr uint64_t kNoRoom = ~uint64_t{0};
  const int first_here = group.nodes[group.node][0];
  uint64_t offset = 0;
  absl::Status room;
  if (group.rank == first_here) {
    const absl::StatusOr<uint64_t> allocated =
        endpoint_->window().Allocate(group.WindowBytes(group.node));
    room = allocated.status();
    offset = allocated.value_or(kNoRoom);
    if (allocated.ok() && group.size() > 1) {
      SlotBoard::Format(endpoint_->window().At(offset),
                        static_cast<int>(group.nodes[group.node].size()));
    }
  }
  std::vector<uint64_t> offsets(size());
  RETURN_IF_ERROR(gather(&offset, offsets.data(), sizeof(offset)));
  RETURN_IF_ERROR(room);
  if (std::count(offsets.begin(), offsets.end(), kNoRoom) > 0) {
    return absl::ResourceExhaustedError(
        "the shared window of a node has no room for another communicator");
  }
  endpoint_->ReportProgress();
  offset = offsets[parent_ranks[first_here]];
  return std::make_unique<HostCommunicator>(endpoint_, std::move(group), offset, tag);
}

}  // namespace heddle
