#include "parallel/host_communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/base/ceil_div.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/host_reduce.h"
#include "parallel/shard_spec.h"

namespace heddle {
namespace {

std::vector<int64_t> OffsetsOf(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> offsets(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), int64_t{0});
  return offsets;
}

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

HostCommunicator::HostCommunicator(std::shared_ptr<Endpoint> endpoint, HostGroup group,
                                   uint64_t window_offset, int tag)
    : endpoint_(std::move(endpoint)), group_(std::move(group)), tag_(tag), rows_(size()) {
  if (size() == 1) return;
  board_ = std::make_unique<SlotBoard>(endpoint_, window_offset, group_.MembersHere(),
                                       group_.SlotBytes(), group_.ResultBytes());
}

void HostCommunicator::Enqueue(Stream& stream, std::function<absl::Status()> work) {
  CpuStream::From(stream).Enqueue([this, work = std::move(work)](CpuThreadPool&) {
    absl::Status status = work();
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
  Enqueue(stream, [this, floats, count, op] {
    return group_.one_node() && (size() == 2 || IsSmall(count))
               ? ReduceInOnePass(floats, count, op)
               : ReduceInTwoPasses(floats, count, op);
  });
  return absl::OkStatus();
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
    incoming_.resize(own_count * size());
    std::vector<Message> sends, receives;
    const Counts offsets = OffsetsOf(counts);
    for (int r = 0; r < size(); ++r) {
      rows_[r] = r == rank() ? own_segment : incoming_.data() + r * own_count;
      if (r == rank()) continue;
      sends.push_back({r, const_cast<float*>(input) + offsets[r],
                       counts[r] * static_cast<int64_t>(sizeof(float))});
      receives.push_back(
          {r, incoming_.data() + r * own_count, own_count * static_cast<int64_t>(sizeof(float))});
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
  members.reserve(parent_ranks.size());
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
