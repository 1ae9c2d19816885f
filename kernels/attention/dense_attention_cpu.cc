// A query token and a KV head at a time: scores of all visible keys, their softmax, the weighted
// sum of the values. The heads of a group share each key and value that is loaded.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/attention/attention_cpu.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/dense_attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

float Dot(const float* a, const float* b, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, a + i + lanes), hn::LoadU(d, b + i + lanes), sum1);
  }
  for (; i + lanes <= count; i += lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
  }
  float rest = 0.0f;
  for (; i < count; ++i) rest += a[i] * b[i];
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + rest;
}

// scores[i] becomes exp(scores[i] - their maximum); returns the sum.
float Softmax(float* scores, int64_t count) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const int64_t lanes = hn::Lanes(d);
  const float maximum = *std::max_element(scores, scores + count);
  auto sums = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto weights = ExpUpTo88(d, hn::Sub(hn::LoadU(d, scores + i), hn::Set(d, maximum)));
    hn::StoreU(weights, d, scores + i);
    sums = hn::Add(sums, weights);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, sums));
  for (; i < count; ++i) {
    scores[i] = hn::GetLane(ExpUpTo88(d1, hn::Set(d1, scores[i] - maximum)));
    sum += scores[i];
  }
  return sum;
}

void AddScaled(const float* x, float scale, float* target, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + i), hn::Set(d, scale), hn::LoadU(d, target + i)), d,
               target + i);
  }
  for (; i < count; ++i) target[i] += x[i] * scale;
}

// Token `token`, which sees the keys from `first_key` to itself; scores is [group, keys].
void AttendToken(const DenseAttentionArgs& args, int64_t token, int64_t first_key, int64_t kv_head,
                 float* scores) {
  const int64_t group = args.num_query_heads / args.num_kv_heads;
  const int64_t num_keys = token + 1 - first_key;
  const int64_t kv_column = kv_head * args.head_dim;
  const float* q = args.q.Row<float>(token) + kv_column * group;
  float* out = args.out.Row<float>(token) + kv_column * group;
  for (int64_t i = 0; i < num_keys; ++i) {
    const float* key = args.k.Row<float>(first_key + i) + kv_column;
    for (int64_t g = 0; g < group; ++g) {
      scores[g * num_keys + i] = Dot(q + g * args.head_dim, key, args.head_dim) * args.scale;
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float* weights = scores + g * num_keys;
    const float inverse = 1.0f / Softmax(weights, num_keys);
    for (int64_t i = 0; i < num_keys; ++i) weights[i] *= inverse;
  }
  std::memset(out, 0, group * args.head_dim * sizeof(float));
  for (int64_t i = 0; i < num_keys; ++i) {
    const float* value = args.v.Row<float>(first_key + i) + kv_column;
    for (int64_t g = 0; g < group; ++g) {
      AddScaled(value, scores[g * num_keys + i], out + g * args.head_dim, args.head_dim);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
namespace {
HWY_EXPORT(AttendToken);

absl::Status RunDenseAttention(const DenseAttentionArgs& args, CpuThreadPool& pool) {
  std::vector<int64_t> first_keys(args.q.rows);  // of each token
  int64_t longest = 0;
  int64_t covered = 0;
  for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) {
    const int64_t begin = args.query_starts[sequence], end = args.query_starts[sequence + 1];
    if (begin != covered || end < begin || end > args.q.rows) {
      return absl::InvalidArgumentError(absl::StrCat("dense_attention: sequence ", sequence,
                                                     ": tokens ", begin, " to ", end, " of ",
                                                     args.q.rows, ", after token ", covered));
    }
    for (int64_t token = begin; token < end; ++token) {
      first_keys[token] = args.window > 0 ? std::max(begin, token + 1 - args.window) : begin;
    }
    longest = std::max(longest, end - begin);
    covered = end;
  }

  const int64_t scores_per_thread = longest * (args.num_query_heads / args.num_kv_heads);
  auto* scores = reinterpret_cast<float*>(
      pool.Scratch(pool.num_threads() * scores_per_thread * sizeof(float)));
  const auto attend_token = HWY_DYNAMIC_DISPATCH(AttendToken);
  std::atomic<int64_t> next_task{0};
  pool.ParallelRun([&](int thread) {
    const int64_t num_tasks = covered * args.num_kv_heads;
    for (int64_t i; (i = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
      const int64_t token = i % covered;
      attend_token(args, token, first_keys[token], i / covered,
                   scores + thread * scores_per_thread);
    }
  });
  return absl::OkStatus();
}

}  // namespace

absl::Status DenseAttentionCpu(const DenseAttentionArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateDenseAttention(args));
  if (args.q.rows == 0 || args.num_query_heads == 0) return absl::OkStatus();
  CpuStream::From(stream).Enqueue(
      [args](CpuThreadPool& pool) { return RunDenseAttention(args, pool); });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
