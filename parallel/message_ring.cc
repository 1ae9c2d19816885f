#include "parallel/message_ring.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "kernels/base/status_macros.h"

namespace heddle {

struct alignas(kCacheLineBytes) MessageRing::Count {
  std::atomic<uint64_t> pieces;
};

size_t MessageRing::BytesFor(int num_readers) {
  return (1 + num_readers) * sizeof(Count) + kNumSlots * kSlotBytes;
}

void MessageRing::Format(void* memory, int num_readers) {
  for (int i = 0; i <= num_readers; ++i) (new (static_cast<Count*>(memory) + i) Count)->pieces = 0;
}

MessageRing::MessageRing(std::shared_ptr<Endpoint> endpoint, uint64_t window_offset, int writer,
                         std::vector<int> readers)
    : endpoint_(std::move(endpoint)),
      memory_(endpoint_->window().At(window_offset)),
      writer_(writer),
      readers_(std::move(readers)) {
  for (size_t i = 0; i < readers_.size(); ++i) {
    if (readers_[i] == endpoint_->rank()) own_reader_ = static_cast<int>(i);
  }
}

std::atomic<uint64_t>& MessageRing::count(int index) const {
  return reinterpret_cast<Count*>(memory_)[index].pieces;
}

std::byte* MessageRing::slot(uint64_t piece) const {
  return memory_ + (1 + readers_.size()) * sizeof(Count) + piece % kNumSlots * kSlotBytes;
}

// The first piece begins with the message's length.
absl::Status MessageRing::Send(absl::string_view message, WaitOp op) {
  if (readers_.empty()) return absl::OkStatus();
  const uint64_t length = message.size();
  bool first = true;
  do {
    for (size_t i = 0; i < readers_.size(); ++i) {
      RETURN_IF_ERROR(endpoint_->Wait({op, readers_[i]}, [&] {
        return count(1 + static_cast<int>(i)).load() + kNumSlots > next_piece_;
      }));
    }
    std::byte* target = slot(next_piece_);
    size_t room = kSlotBytes;
    if (first) {
      std::memcpy(target, &length, sizeof(length));
      target += sizeof(length);
      room -= sizeof(length);
      first = false;
    }
    const size_t bytes = std::min(room, message.size());
    std::memcpy(target, message.data(), bytes);
    message.remove_prefix(bytes);
    count(0).store(++next_piece_);
    for (const int reader : readers_) endpoint_->Wake(endpoint_->place(reader).node_rank);
  } while (!message.empty());
  return absl::OkStatus();
}

absl::Status MessageRing::Receive(std::string& message, WaitReason reason) {
  reason.peer = writer_;
  message.clear();
  uint64_t left = 0;
  bool first = true;
  do {
    RETURN_IF_ERROR(endpoint_->Wait(reason, [&] { return count(0).load() > next_piece_; }));
    const std::byte* source = slot(next_piece_);
    size_t room = kSlotBytes;
    if (first) {
      std::memcpy(&left, source, sizeof(left));
      source += sizeof(left);
      room -= sizeof(left);
      message.reserve(left);
      first = false;
    }
    const size_t bytes = std::min<uint64_t>(room, left);
    message.append(reinterpret_cast<const char*>(source), bytes);
    left -= bytes;
    count(1 + own_reader_).store(++next_piece_);
    endpoint_->Wake(endpoint_->place(writer_).node_rank);
  } while (left > 0);
  return absl::OkStatus();
}

}  // namespace heddle
