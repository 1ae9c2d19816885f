// A queue of messages in a node's window: one writer, some readers that each get every message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "parallel/endpoint.h"

namespace heddle {

// One rank's side. The writer runs ahead of the slowest reader by at most kNumSlots pieces of
// kSlotBytes; longer messages flow through. Used by one thread.
class MessageRing {
 public:
  static constexpr int kNumSlots = 8;
  static constexpr size_t kSlotBytes = 16 << 10;

  static size_t BytesFor(int num_readers);
  static void Format(void* memory, int num_readers);

  // `writer` and `readers` are world ranks of this node; the own rank is one of them.
  MessageRing(std::shared_ptr<Endpoint> endpoint, uint64_t window_offset, int writer,
              std::vector<int> readers);

  absl::Status Send(absl::string_view message, WaitOp op);
  absl::Status Receive(std::string& message, WaitReason reason);

 private:
  struct Count;
  // Pieces published by the writer (0) and taken by each reader (1 + its index).
  std::atomic<uint64_t>& count(int index) const;
  std::byte* slot(uint64_t piece) const;

  const std::shared_ptr<Endpoint> endpoint_;
  std::byte* const memory_;
  const int writer_;
  const std::vector<int> readers_;
  int own_reader_ = -1;
  uint64_t next_piece_ = 0;
};

}  // namespace heddle
