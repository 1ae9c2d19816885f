#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/merge_partials.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"

namespace heddle {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The parts' shares are few and their rows long, so only the latter are vectorised, by the
// compiler. A part that has seen nothing is left out, as its row may hold anything.
void MergeRow(const MergePartialsArgs& args, int64_t token, int64_t head) {
  const float* log_sum_exps = args.log_sum_exps.At(token, head);
  const auto log_sum_exp = [&](int64_t part) {
    return log_sum_exps[part * args.log_sum_exp_stride];
  };
  float maximum = kNothing;
  for (int64_t part = 0; part < args.num_parts; ++part) {
    maximum = std::max(maximum, log_sum_exp(part));
  }
  float sum = 0.0f;
  for (int64_t part = 0; part < args.num_parts; ++part) {
    if (log_sum_exp(part) != kNothing) sum += std::exp(log_sum_exp(part) - maximum);
  }
  float* out = args.out.At(token, head);
  std::fill_n(out, args.out.dim, 0.0f);
  for (int64_t part = 0; part < args.num_parts; ++part) {
    if (log_sum_exp(part) == kNothing) continue;
    const float share = std::exp(log_sum_exp(part) - maximum) / sum;
    const float* row = args.partials.At(token, head) + part * args.partial_stride;
    for (int64_t i = 0; i < args.out.dim; ++i) out[i] += share * row[i];
  }
  if (args.log_sum_exp.data != nullptr) {
    *args.log_sum_exp.At(token, head) = sum == 0.0f ? kNothing : maximum + std::log(sum);
  }
}

}  // namespace

absl::Status MergePartialsCpu(const MergePartialsArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateMergePartials(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    ParallelRows(pool, args.out.tokens * args.out.heads, args.num_parts * args.out.dim,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     MergeRow(args, row / args.out.heads, row % args.out.heads);
                   }
                 });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
