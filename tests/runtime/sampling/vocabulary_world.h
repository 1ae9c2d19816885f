// Ranks as threads, each with its slice of the same logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/base/backend.h"
#include "kernels/base/tensor_view.h"
#include "kernels/cpu/cpu_backend.h"
#include "parallel/shard_spec.h"
#include "parallel/thread_world.h"

namespace heddle {

using LogitRows = std::vector<std::vector<float>>;  // [rows][vocab]

struct RankOfVocabulary {
  std::vector<Range> shards;
  ConstMatrixView logits;  // [rows, local vocabulary]
  World& world;
  Backend& backend;
  Stream& stream;
};

// Runs `body` on every rank. Slices are written to the stream's device by a late op, so that a
// reader which does not synchronise sees NaN under a deferred stream.
inline void OnRanks(const LogitRows& rows, int64_t vocab_size, int num_ranks,
                    const CpuBackendOptions& backend_options,
                    const std::function<absl::Status(RankOfVocabulary& rank)>& body) {
  auto job = ThreadWorld::Create({.size = num_ranks});
  ASSERT_TRUE(job.ok()) << job.status();
  const std::vector<absl::Status> results = (*job)->Run([&](World& world) -> absl::Status {
    std::vector<Range> shards;
    for (int rank = 0; rank < num_ranks; ++rank) {
      shards.push_back(SplitVocabulary(vocab_size, num_ranks, rank));
    }
    const Range own = shards[world.self.rank];
    const std::unique_ptr<Backend> backend = CreateCpuBackend(backend_options);
    const std::unique_ptr<Stream> stream = *backend->CreateStream();
    std::vector<float> slice(rows.size() * own.size(), std::nanf(""));
    float* const target = slice.data();
    CpuStream::From(*stream).Enqueue([&rows, own, target](CpuThreadPool&) {
      for (size_t row = 0; row < rows.size(); ++row) {
        std::copy(rows[row].begin() + own.begin, rows[row].begin() + own.end,
                  target + row * own.size());
      }
      return absl::OkStatus();
    });
    RankOfVocabulary rank = {
        .shards = shards,
        .logits = FloatMatrix(static_cast<const float*>(target), rows.size(), own.size()),
        .world = world,
        .backend = *backend,
        .stream = *stream};
    return body(rank);
  });
  for (const absl::Status& result : results) EXPECT_TRUE(result.ok()) << result;
}

}  // namespace heddle
