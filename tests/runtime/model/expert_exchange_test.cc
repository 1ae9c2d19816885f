// Tokens on their way to the ranks of their experts and back.
#include "runtime/model/expert_exchange.h"

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend_registry.h"
#include "kernels/base/status_macros.h"
#include "parallel/thread_world.h"

namespace heddle {
namespace {

constexpr int64_t kHidden = 5;
constexpr int64_t kTopK = 3;
constexpr int64_t kMaxReceived = 12;

// Uneven shares, and a rank without experts.
const std::vector<Range> kExperts = {{0, 4}, {4, 5}, {5, 5}, {5, 7}};
const int kNumRanks = static_cast<int>(kExperts.size());

// Each rank multiplies what it received by its number plus one: token t comes back times the sum of
// those of its experts' ranks, once each.
absl::Status RunRank(World& world, CpuStreamMode stream_mode) {
  BackendOptions options;
  options.cpu.num_threads = 1;
  options.cpu.stream_mode = stream_mode;
  ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, CreateBackend(options));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->CreateStream());
  ASSIGN_OR_RETURN(const std::unique_ptr<ExpertExchange> exchange,
                   ExpertExchange::Create(kExperts, kTopK, kHidden, kMaxReceived,
                                          *world.communicator, *backend));
  EXPECT_EQ(exchange->max_own_tokens(), 3);
  const int rank = world.self.rank;
  std::mt19937 random(rank);
  for (int64_t round = 0; round < 20; ++round) {
    const int64_t tokens = random() % 4;  // none, now and then
    std::vector<float> x(tokens * kHidden), out(tokens * kHidden, 100.0f);
    for (float& value : x) value = static_cast<float>(static_cast<int>(random() % 64)) - 32.0f;
    std::vector<int32_t> ids;
    std::vector<float> factors;
    for (int64_t token = 0; token < tokens; ++token) {
      std::vector<int32_t> all = {0, 1, 2, 3, 4, 5, 6};
      std::shuffle(all.begin(), all.end(), random);
      std::set<int> ranks;
      for (int64_t i = 0; i < kTopK; ++i) {
        ids.push_back(all[i]);
        for (int r = 0; r < kNumRanks; ++r) {
          if (kExperts[r].Contains(all[i])) ranks.insert(r);
        }
      }
      factors.push_back(0.0f);
      for (const int r : ranks) factors.back() += static_cast<float>(r + 1);
    }
    ASSIGN_OR_RETURN(const ConstMatrixView received,
                     exchange->Send(FloatMatrix(x.data(), tokens, kHidden), ids.data(), *stream));
    RETURN_IF_ERROR(stream->Synchronize());
    EXPECT_TRUE(!kExperts[rank].empty() || received.rows == 0);
    const MatrixView summands = exchange->summands();
    EXPECT_EQ(summands.rows, received.rows);
    for (int64_t i = 0; i < received.rows * kHidden; ++i) {
      summands.Row<float>(0)[i] = received.Row<float>(0)[i] * static_cast<float>(rank + 1);
    }
    const bool add = round % 2 == 0;
    RETURN_IF_ERROR(exchange->Return(add, FloatMatrix(out.data(), tokens, kHidden), *stream));
    RETURN_IF_ERROR(stream->Synchronize());
    for (int64_t i = 0; i < tokens * kHidden; ++i) {
      EXPECT_EQ(out[i], (add ? 100.0f : 0.0f) + x[i] * factors[i / kHidden]) << i;
    }
  }
  return absl::OkStatus();
}

TEST(ExpertExchange, GivesBackTheSumOfItsExpertsRanks) {
  for (const CpuStreamMode mode : {CpuStreamMode::kImmediate, CpuStreamMode::kDeferred}) {
    for (const int ranks_per_node : {0, 2}) {
      ThreadWorldOptions options;
      options.size = kNumRanks;
      options.ranks_per_node = ranks_per_node;
      const auto world = ThreadWorld::Create(options);
      ASSERT_TRUE(world.ok()) << world.status();
      for (const absl::Status& status :
           (*world)->Run([&](World& self) { return RunRank(self, mode); })) {
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

}  // namespace
}  // namespace heddle
