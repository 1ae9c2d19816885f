// How the members of a communicator that share a node pass data: each writes pieces into slots of
// its own, and all others read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "parallel/endpoint.h"

namespace heddle {

// One member's side of a board; used by one thread. All members go through the same rounds: in
// round r each writes (or skips) its slot, says so, and waits until all others have. A member may
// write round r + 1 and r + 2 before it has read r, if it does so in every operation alike; with
// four slots nobody then overwrites what another still reads:
//   whoever writes round r has seen everyone in round r - 2 or later, and a member that says it has
//   written round r - 2 has read all rounds up to r - 4.
class SlotBoard {
 public:
  static constexpr int kNumSlots = 4;
  // Room for a word or two beside the data of each slot.
  static constexpr size_t kNoteBytes = kCacheLineBytes;

  static size_t BytesFor(int num_members, size_t slot_bytes, size_t result_bytes);
  // By one member, before any other constructs its side.
  static void Format(void* memory, int num_members);

  // `members` are world ranks, all on this node.
  SlotBoard(std::shared_ptr<Endpoint> endpoint, uint64_t window_offset, std::vector<int> members,
            size_t slot_bytes, size_t result_bytes);

  int num_members() const { return static_cast<int>(members_.size()); }
  int self() const { return self_; }
  size_t slot_bytes() const { return slot_bytes_; }

  // The piece that `member` wrote in `round`, and a note about it.
  std::byte* slot(int member, uint64_t round) const;
  uint64_t& note(int member, uint64_t round) const;
  float* slot_floats(int member, uint64_t round) const {
    return reinterpret_cast<float*>(slot(member, round));
  }
  // What `member` made of everyone's pieces of `round`.
  float* result_floats(int member, uint64_t round) const;

  // Rounds are said in order; a round without results is simply not said.
  void SayWritten(uint64_t round);
  void SayReduced(uint64_t round);
  absl::Status AwaitWritten(uint64_t round, WaitOp op);
  absl::Status AwaitReduced(int member, uint64_t round, WaitOp op);

  // Point to point, a piece at a time: Post waits until the receiver has called Taken.
  std::byte* outbox(int member) const;
  absl::Status Post(int receiver);
  absl::Status AwaitPost(int sender);
  void Taken(int sender);

 private:
  struct Flags;
  Flags& flags(int member) const;
  std::byte* AreaOf(int member) const;
  void WakeOthers();

  const std::shared_ptr<Endpoint> endpoint_;
  std::byte* const memory_;
  const std::vector<int> members_;
  const size_t slot_bytes_;
  const size_t result_bytes_;
  int self_ = 0;
};

}  // namespace heddle
