#include "parallel/thread_link.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"

namespace heddle {
namespace {

constexpr int64_t kCopiedAtOnce = 4096;

// A message that was sent and not yet received.
struct Letter {
  std::vector<std::byte> copy;
  const void* data = nullptr;  // of `copy`, or the sender's own
  int64_t bytes = 0;
  bool taken = false;
};

}  // namespace

struct ThreadPost::State {
  using Key = std::tuple<int, int, int>;  // from, to, tag

  std::mutex mutex;
  std::map<Key, std::deque<std::shared_ptr<Letter>>> boxes;
};

class ThreadPost::Link : public PeerLink {
 public:
  Link(std::shared_ptr<State> state, int rank) : state_(std::move(state)), rank_(rank) {}

  absl::StatusOr<std::unique_ptr<Transfer>> Send(int peer, int tag, const void* data,
                                                 int64_t bytes) override {
    auto letter = std::make_shared<Letter>();
    letter->bytes = bytes;
    letter->data = data;
    if (bytes <= kCopiedAtOnce) {
      const auto* first = static_cast<const std::byte*>(data);
      letter->copy.assign(first, first + bytes);
      letter->data = letter->copy.data();
    }
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->boxes[{rank_, peer, tag}].push_back(letter);
    return std::make_unique<Sending>(state_, std::move(letter));
  }

  absl::StatusOr<std::unique_ptr<Transfer>> Recv(int peer, int tag, void* data,
                                                 int64_t bytes) override {
    return std::make_unique<Receiving>(state_, State::Key{peer, rank_, tag}, data, bytes);
  }

 private:
  class Sending : public Transfer {
   public:
    Sending(std::shared_ptr<State> state, std::shared_ptr<Letter> letter)
        : state_(std::move(state)), letter_(std::move(letter)) {}

    // A letter whose sender gives up must not be read from the sender's buffer later.
    ~Sending() override {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      if (!IsFree()) letter_->data = nullptr;
    }

    absl::StatusOr<bool> Test() override {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      return IsFree();
    }

   private:
    bool IsFree() const { return letter_->taken || letter_->bytes <= kCopiedAtOnce; }

    const std::shared_ptr<State> state_;
    const std::shared_ptr<Letter> letter_;
  };

  class Receiving : public Transfer {
   public:
    Receiving(std::shared_ptr<State> state, State::Key key, void* data, int64_t bytes)
        : state_(std::move(state)), key_(key), data_(data), bytes_(bytes) {}

    absl::StatusOr<bool> Test() override {
      if (done_) return true;
      const std::lock_guard<std::mutex> lock(state_->mutex);
      auto& box = state_->boxes[key_];
      if (box.empty() || box.front()->data == nullptr) return false;
      const std::shared_ptr<Letter> letter = box.front();
      if (letter->bytes != bytes_) {
        return absl::InternalError(absl::StrCat("rank ", std::get<0>(key_), " sent ", letter->bytes,
                                                " bytes where ", bytes_, " were expected"));
      }
      if (bytes_ > 0) std::memcpy(data_, letter->data, bytes_);
      letter->taken = true;
      box.pop_front();
      done_ = true;
      return true;
    }

   private:
    const std::shared_ptr<State> state_;
    const State::Key key_;
    void* const data_;
    const int64_t bytes_;
    bool done_ = false;
  };

  const std::shared_ptr<State> state_;
  const int rank_;
};

ThreadPost::ThreadPost() : state_(std::make_shared<State>()) {}
ThreadPost::~ThreadPost() = default;

std::unique_ptr<PeerLink> ThreadPost::LinkOf(int rank) {
  return std::make_unique<Link>(state_, rank);
}

}  // namespace heddle
