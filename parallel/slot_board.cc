#include "parallel/slot_board.h"

#include <algorithm>
#include <new>

#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"

namespace heddle {

// Counters of rounds said, each on lines that only its writer dirties.
struct SlotBoard::Flags {
  alignas(kCacheLineBytes) std::atomic<uint64_t> written;
  alignas(kCacheLineBytes) std::atomic<uint64_t> reduced;
  alignas(kCacheLineBytes) std::atomic<uint64_t> posted;
  std::atomic<int32_t> receiver;
  alignas(kCacheLineBytes) std::atomic<uint64_t> taken;  // written by the receiver
};

namespace {

size_t AreaBytes(size_t slot_bytes, size_t result_bytes) {
  // One more slot is the outbox.
  return (SlotBoard::kNumSlots + 1) * (SlotBoard::kNoteBytes + RoundUpToCacheLine(slot_bytes)) +
         SlotBoard::kNumSlots * RoundUpToCacheLine(result_bytes);
}

}  // namespace

size_t SlotBoard::BytesFor(int num_members, size_t slot_bytes, size_t result_bytes) {
  return num_members * (sizeof(Flags) + AreaBytes(slot_bytes, result_bytes));
}

void SlotBoard::Format(void* memory, int num_members) {
  auto* all_flags = static_cast<Flags*>(memory);
  for (int i = 0; i < num_members; ++i) {
    auto* flags = new (&all_flags[i]) Flags;
    flags->written = 0;
    flags->reduced = 0;
    flags->posted = 0;
    flags->receiver = 0;
    flags->taken = 0;
  }
}

SlotBoard::SlotBoard(std::shared_ptr<Endpoint> endpoint, uint64_t window_offset,
                     std::vector<int> members, size_t slot_bytes, size_t result_bytes)
    : endpoint_(std::move(endpoint)),
      memory_(endpoint_->window().At(window_offset)),
      members_(std::move(members)),
      slot_bytes_(slot_bytes),
      result_bytes_(result_bytes) {
  const auto self = std::find(members_.begin(), members_.end(), endpoint_->rank());
  CHECK(self != members_.end());
  self_ = static_cast<int>(self - members_.begin());
}

SlotBoard::Flags& SlotBoard::flags(int member) const {
  return reinterpret_cast<Flags*>(memory_)[member];
}

std::byte* SlotBoard::AreaOf(int member) const {
  return memory_ + num_members() * sizeof(Flags) + member * AreaBytes(slot_bytes_, result_bytes_);
}

uint64_t& SlotBoard::note(int member, uint64_t round) const {
  return *reinterpret_cast<uint64_t*>(slot(member, round) - kNoteBytes);
}

std::byte* SlotBoard::slot(int member, uint64_t round) const {
  return AreaOf(member) + kNoteBytes +
         round % kNumSlots * (kNoteBytes + RoundUpToCacheLine(slot_bytes_));
}

std::byte* SlotBoard::outbox(int member) const {
  return AreaOf(member) + kNumSlots * (kNoteBytes + RoundUpToCacheLine(slot_bytes_)) + kNoteBytes;
}

float* SlotBoard::result_floats(int member, uint64_t round) const {
  return reinterpret_cast<float*>(outbox(member) + RoundUpToCacheLine(slot_bytes_) +
                                  round % kNumSlots * RoundUpToCacheLine(result_bytes_));
}

void SlotBoard::WakeOthers() {
  for (int i = 0; i < num_members(); ++i) {
    if (i != self_) endpoint_->Wake(endpoint_->place(members_[i]).node_rank);
  }
}

void SlotBoard::SayWritten(uint64_t round) {
  flags(self_).written.store(round + 1);
  WakeOthers();
}

void SlotBoard::SayReduced(uint64_t round) {
  flags(self_).reduced.store(round + 1);
  WakeOthers();
}

absl::Status SlotBoard::AwaitWritten(uint64_t round, WaitOp op) {
  for (int i = 0; i < num_members(); ++i) {
    const std::atomic<uint64_t>& written = flags(i).written;
    RETURN_IF_ERROR(endpoint_->Wait({op, members_[i]}, [&] { return written.load() > round; }));
  }
  return absl::OkStatus();
}

absl::Status SlotBoard::AwaitReduced(int member, uint64_t round, WaitOp op) {
  const std::atomic<uint64_t>& reduced = flags(member).reduced;
  return endpoint_->Wait({op, members_[member]}, [&] { return reduced.load() > round; });
}

absl::Status SlotBoard::Post(int receiver) {
  Flags& own = flags(self_);
  own.receiver.store(receiver);
  const uint64_t posted = own.posted.load() + 1;
  own.posted.store(posted);
  endpoint_->Wake(endpoint_->place(members_[receiver]).node_rank);
  return endpoint_->Wait({WaitOp::kSend, members_[receiver]},
                         [&] { return own.taken.load() == posted; });
}

absl::Status SlotBoard::AwaitPost(int sender) {
  const Flags& theirs = flags(sender);
  // A post stands until its receiver has taken it, so the three words belong together.
  return endpoint_->Wait({WaitOp::kRecv, members_[sender]}, [&] {
    return theirs.posted.load() != theirs.taken.load() && theirs.receiver.load() == self_;
  });
}

void SlotBoard::Taken(int sender) {
  Flags& theirs = flags(sender);
  theirs.taken.store(theirs.posted.load());
  endpoint_->Wake(endpoint_->place(members_[sender]).node_rank);
}

}  // namespace heddle
