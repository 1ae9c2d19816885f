// Messages between ranks of a ThreadWorld that pretend to be on different nodes.
#pragma once

#include <memory>

#include "parallel/peer_link.h"

namespace heddle {

// The mailboxes of all ranks. Long messages are handed over as MPI does: the sender's buffer is in
// use until the receiver has copied it.
class ThreadPost {
 public:
  ThreadPost();
  ~ThreadPost();

  // The link of `rank`; keeps what it shares alive.
  std::unique_ptr<PeerLink> LinkOf(int rank);

 private:
  struct State;
  class Link;
  std::shared_ptr<State> state_;
};

}  // namespace heddle
