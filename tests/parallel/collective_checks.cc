#include "tests/parallel/collective_checks.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "parallel/kv_grid.h"

namespace heddle {
namespace {

// Numbers of very different sizes, so that another order of addition gives other bits.
float Value(int rank, int64_t index, uint64_t salt) {
  uint64_t x = (static_cast<uint64_t>(rank) << 40) + static_cast<uint64_t>(index) + (salt << 52);
  x ^= x >> 31;
  x *= 0x9e3779b97f4a7c15ULL;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 32;
  // Any sign and mantissa, exponents of -8 to 7.
  const uint32_t exponent = 119 + static_cast<uint32_t>(x >> 60);
  return std::bit_cast<float>(static_cast<uint32_t>(x & 0x807fffff) | exponent << 23);
}

std::vector<float> Row(int rank, int64_t count, uint64_t salt) {
  std::vector<float> row(count);
  for (int64_t i = 0; i < count; ++i) row[i] = Value(rank, i, salt);
  return row;
}

template <typename T>
absl::Status ExpectEqual(const char* what, const std::vector<T>& actual,
                         const std::vector<T>& expected) {
  if (actual.size() != expected.size()) {
    return absl::InternalError(
        absl::StrCat(what, ": ", actual.size(), " elements instead of ", expected.size()));
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) != 0) {
      return absl::InternalError(absl::StrCat(what, ": element ", i, " of ", actual.size(), " is ",
                                              actual[i], " instead of ", expected[i]));
    }
  }
  return absl::OkStatus();
}

// Uneven by design: the middle ranks get nothing, the last most.
int64_t ShareOf(int rank, int size, int64_t count) {
  if (size > 2 && rank == size / 2) return 0;
  return count / size + rank;
}

class Checker {
 public:
  Checker(Communicator& communicator, int64_t count, Stream& stream)
      : communicator_(communicator),
        rank_(communicator.rank()),
        size_(communicator.size()),
        count_(count),
        stream_(stream) {}

  absl::Status AllReduceSum() {
    // Several in a row and only then a look: on a deferred stream they all wait.
    const uint64_t num_rows = count_ < 100'000 ? 3 : 1;
    std::vector<std::vector<float>> rows;
    for (uint64_t salt = 0; salt < num_rows; ++salt) rows.push_back(Row(rank_, count_, salt));
    for (auto& row : rows) {
      RETURN_IF_ERROR(
          communicator_.AllReduce(row.data(), count_, DType::kFloat32, ReduceOp::kSum, stream_));
    }
    RETURN_IF_ERROR(stream_.Synchronize());
    for (uint64_t salt = 0; salt < num_rows; ++salt) {
      RETURN_IF_ERROR(ExpectEqual("AllReduce sum", rows[salt], SumOfRows(count_, salt)));
    }
    return absl::OkStatus();
  }

  absl::Status AllReduceMax() {
    std::vector<float> row = Row(rank_, count_, 4);
    std::vector<float> expected(count_, -std::numeric_limits<float>::infinity());
    for (int r = 0; r < size_; ++r) {
      for (int64_t i = 0; i < count_; ++i) expected[i] = std::max(expected[i], Value(r, i, 4));
    }
    const bool poisoned = count_ > 2;
    if (poisoned && rank_ == size_ - 1) row[2] = std::nanf("");
    RETURN_IF_ERROR(
        communicator_.AllReduce(row.data(), count_, DType::kFloat32, ReduceOp::kMax, stream_));
    RETURN_IF_ERROR(stream_.Synchronize());
    if (poisoned) {
      if (!std::isnan(row[2])) return absl::InternalError("AllReduce max lost a NaN");
      row[2] = expected[2];
    }
    return ExpectEqual("AllReduce max", row, expected);
  }

  absl::Status AllGather() {
    std::vector<int64_t> bytes;
    std::vector<float> expected;
    int64_t own_begin = 0;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) own_begin = expected.size();
      const std::vector<float> row = Row(r, ShareOf(r, size_, count_), 5);
      expected.insert(expected.end(), row.begin(), row.end());
      bytes.push_back(row.size() * sizeof(float));
    }
    const std::vector<float> own = Row(rank_, ShareOf(rank_, size_, count_), 5);
    std::vector<float> all(expected.size());
    RETURN_IF_ERROR(communicator_.AllGatherV(own.data(), all.data(), bytes, stream_));
    // And in place.
    std::vector<float> in_place(expected.size());
    std::copy(own.begin(), own.end(), in_place.begin() + own_begin);
    RETURN_IF_ERROR(
        communicator_.AllGatherV(in_place.data() + own_begin, in_place.data(), bytes, stream_));
    RETURN_IF_ERROR(stream_.Synchronize());
    RETURN_IF_ERROR(ExpectEqual("AllGatherV", all, expected));
    return ExpectEqual("AllGatherV in place", in_place, expected);
  }

  absl::Status ReduceScatter() {
    std::vector<int64_t> counts;
    int64_t begin = 0, total = 0;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) begin = total;
      counts.push_back(ShareOf(r, size_, count_));
      total += counts.back();
    }
    std::vector<float> input = Row(rank_, total, 6);
    const std::vector<float> sum = SumOfRows(total, 6);
    const std::vector<float> expected(sum.begin() + begin, sum.begin() + begin + counts[rank_]);
    std::vector<float> output(counts[rank_]);
    RETURN_IF_ERROR(communicator_.ReduceScatterV(input.data(), output.data(), counts,
                                                 DType::kFloat32, stream_));
    // And into its own segment.
    RETURN_IF_ERROR(communicator_.ReduceScatterV(input.data(), input.data() + begin, counts,
                                                 DType::kFloat32, stream_));
    RETURN_IF_ERROR(stream_.Synchronize());
    RETURN_IF_ERROR(ExpectEqual("ReduceScatterV", output, expected));
    const std::vector<float> segment(input.begin() + begin, input.begin() + begin + counts[rank_]);
    return ExpectEqual("ReduceScatterV in place", segment, expected);
  }

  absl::Status AllToAll() {
    // Rank a sends b a row of its own length, bytes that are not a whole number of floats.
    const auto length = [&](int from, int to) {
      return (from + to) % 3 == 0 && from != to ? 0 : count_ / size_ + 5 * from + to;
    };
    std::vector<uint8_t> input, expected;
    std::vector<int64_t> to, from;
    const auto fill = [&](std::vector<uint8_t>& bytes, int a, int b) {
      for (int64_t i = 0; i < length(a, b); ++i) bytes.push_back(a * 41 + b * 7 + i * 13);
    };
    for (int r = 0; r < size_; ++r) {
      fill(input, rank_, r);
      fill(expected, r, rank_);
      to.push_back(length(rank_, r));
      from.push_back(length(r, rank_));
    }
    std::vector<uint8_t> output(expected.size());
    RETURN_IF_ERROR(communicator_.AllToAllV(input.data(), to, output.data(), from, stream_));
    RETURN_IF_ERROR(stream_.Synchronize());
    return ExpectEqual("AllToAllV", output, expected);
  }

  absl::Status Broadcast() {
    for (int root = 0; root < size_; root += std::max(1, size_ - 1)) {
      std::vector<float> row = Row(rank_, count_, 7);
      RETURN_IF_ERROR(communicator_.Broadcast(row.data(), count_ * sizeof(float), root, stream_));
      RETURN_IF_ERROR(stream_.Synchronize());
      RETURN_IF_ERROR(ExpectEqual("Broadcast", row, Row(root, count_, 7)));
    }
    return absl::OkStatus();
  }

  // A token goes once around the ring and doubles at each rank.
  absl::Status SendRecv() {
    if (size_ == 1) return absl::OkStatus();
    const int next = (rank_ + 1) % size_, previous = (rank_ + size_ - 1) % size_;
    std::vector<float> token = Row(0, count_, 8);
    const int64_t bytes = count_ * sizeof(float);
    if (rank_ != 0) {
      RETURN_IF_ERROR(communicator_.Recv(token.data(), bytes, previous, stream_));
      RETURN_IF_ERROR(stream_.Synchronize());
    }
    for (float& x : token) x *= 2;
    RETURN_IF_ERROR(communicator_.Send(token.data(), bytes, next, stream_));
    RETURN_IF_ERROR(stream_.Synchronize());
    if (rank_ != 0) return absl::OkStatus();
    RETURN_IF_ERROR(communicator_.Recv(token.data(), bytes, previous, stream_));
    RETURN_IF_ERROR(stream_.Synchronize());
    std::vector<float> expected = Row(0, count_, 8);
    for (float& x : expected) x = std::ldexp(x, size_);
    return ExpectEqual("Send and Recv", token, expected);
  }

 private:
  std::vector<float> SumOfRows(int64_t count, uint64_t salt) const {
    std::vector<float> sum = Row(0, count, salt);
    for (int r = 1; r < size_; ++r) {
      for (int64_t i = 0; i < count; ++i) sum[i] += Value(r, i, salt);
    }
    return sum;
  }

  Communicator& communicator_;
  const int rank_;
  const int size_;
  const int64_t count_;
  Stream& stream_;
};

}  // namespace

absl::Status CheckCollectives(Communicator& communicator, int64_t count, CpuStreamMode mode) {
  const std::unique_ptr<Backend> backend =
      CreateCpuBackend({.num_threads = 1, .stream_mode = mode});
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->CreateStream());
  Checker check(communicator, count, *stream);
  const absl::Status status = [&] {
    RETURN_IF_ERROR(check.AllReduceSum());
    RETURN_IF_ERROR(check.AllReduceMax());
    RETURN_IF_ERROR(check.AllGather());
    RETURN_IF_ERROR(check.ReduceScatter());
    RETURN_IF_ERROR(check.AllToAll());
    RETURN_IF_ERROR(check.Broadcast());
    RETURN_IF_ERROR(check.SendRecv());
    // Small after large: slots and counters are where they should be.
    return Checker(communicator, 5, *stream).AllReduceSum();
  }();
  return Annotate(status, absl::StrCat("rank ", communicator.rank(), " of ", communicator.size(),
                                       ", ", count, " floats"));
}

absl::Status CheckSplits(World& world, int64_t count) {
  Communicator& all = *world.communicator;
  // Odd and even ranks, the even ones in reverse order.
  const bool even = all.rank() % 2 == 0;
  ASSIGN_OR_RETURN(const auto half, all.Split(even ? 10 : -3, even ? -all.rank() : 0));
  const int expected_size = (all.size() + (even ? 1 : 0)) / 2;
  const int place = all.rank() / 2;
  const int expected_rank = even ? expected_size - 1 - place : place;
  if (half->size() != expected_size || half->rank() != expected_rank) {
    return absl::InternalError(
        absl::StrCat("after Split rank ", all.rank(), " is ", half->rank(), " of ", half->size()));
  }
  RETURN_IF_ERROR(CheckCollectives(*half, count, CpuStreamMode::kImmediate));

  // Everyone, in an order that jumps between nodes: sums follow the group's order all the same.
  ASSIGN_OR_RETURN(const auto shuffled, all.Split(0, all.rank() * 5 % 7));
  RETURN_IF_ERROR(CheckCollectives(*shuffled, count, CpuStreamMode::kImmediate));

  for (int stripes = 1; stripes <= all.size(); ++stripes) {
    if (all.size() % stripes != 0) continue;
    ASSIGN_OR_RETURN(const KvGrid grid, KvGrid::Create(16, 1, all.size(), stripes));
    const KvGridRank& own = grid.rank(all.rank());
    ASSIGN_OR_RETURN(const auto stripe_group, all.SplitAlong(grid, GridAxis::kStripe));
    ASSIGN_OR_RETURN(const auto shards, all.SplitAlong(grid, GridAxis::kHeadShard));
    if (stripe_group->size() != stripes || stripe_group->rank() != own.stripe ||
        shards->size() != all.size() / stripes || shards->rank() != own.head_shard) {
      return absl::InternalError("a group along an axis has the wrong members");
    }
    // Interleaved use of groups that share members.
    RETURN_IF_ERROR(CheckCollectives(*stripe_group, count, CpuStreamMode::kDeferred));
    RETURN_IF_ERROR(CheckCollectives(*shards, count, CpuStreamMode::kImmediate));
    RETURN_IF_ERROR(CheckCollectives(all, 5, CpuStreamMode::kImmediate));
  }
  return absl::OkStatus();
}

absl::Status CheckControlChannel(World& world) {
  ControlChannel& control = *world.control;
  const int rank = world.self.rank;
  const auto text = [](size_t length, int salt) {
    std::string s(length, '\0');
    for (size_t i = 0; i < length; ++i) s[i] = static_cast<char>(i * 31 + salt);
    return s;
  };
  // Around the size of a slot, and many times the room that is shared.
  const size_t lengths[] = {0, 1, 100, 16376, 16377, 16384, 16385, 1'000'000};
  for (const size_t length : lengths) {
    std::string message = rank == 0 ? text(length, 3) : "old";
    RETURN_IF_ERROR(control.Broadcast(message));
    if (message != text(length, 3)) {
      return absl::InternalError(absl::StrCat("Broadcast of ", length, " bytes"));
    }
    ASSIGN_OR_RETURN(const auto messages, control.Gather(text(length + rank, rank)));
    if (messages.size() != (rank == 0 ? world.self.size : 0u)) {
      return absl::InternalError("Gather gave the wrong number of messages");
    }
    for (size_t r = 0; r < messages.size(); ++r) {
      if (messages[r] != text(length + r, r)) {
        return absl::InternalError(absl::StrCat("Gather of rank ", r, ", ", length, " bytes"));
      }
    }
  }
  // Rank 0 runs ahead.
  for (int i = 0; i < 100; ++i) {
    std::string message = absl::StrCat("plan ", rank == 0 ? i : -1);
    RETURN_IF_ERROR(control.Broadcast(message));
    if (message != absl::StrCat("plan ", i)) return absl::InternalError("plans out of order");
  }
  const int64_t pages[] = {1000 - rank, 500 + rank, int64_t{-3} << 40};
  const int64_t expected[] = {1000 - (world.self.size - 1), 500, int64_t{-3} << 40};
  for (int i = 0; i < 3; ++i) {
    ASSIGN_OR_RETURN(const int64_t least, control.AllReduceMin(pages[i]));
    if (least != expected[i]) return absl::InternalError(absl::StrCat("minimum ", least));
  }
  return control.Barrier();
}

}  // namespace heddle
