#include "runtime/model/stripe_exchange.h"

#include <algorithm>
#include <numeric>

#include "absl/memory/memory.h"
#include "kernels/base/logging.h"
#include "kernels/base/status_macros.h"
#include "kernels/kernel_table.h"

namespace heddle {
namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

}  // namespace

StripeExchange::StripeExchange(const KvGrid& grid, int rank, int64_t max_rows, int64_t query_dim,
                               int64_t value_dim, const KernelTable& kernels)
    : kernels_(kernels), max_rows_(max_rows), query_dim_(query_dim), value_dim_(value_dim) {
  for (int stripe = 0; stripe < grid.num_stripes(); ++stripe) {
    const int peer = grid.RankOf(grid.rank(rank).head_shard, stripe);
    heads_.push_back(grid.rank(peer).query_heads.size());
  }
  max_heads_ = *std::max_element(heads_.begin(), heads_.end());
}

absl::StatusOr<std::unique_ptr<StripeExchange>> StripeExchange::Create(
    const KvGrid& grid, int rank, int64_t max_rows, int64_t query_dim, int64_t value_dim,
    Communicator& world, Backend& backend) {
  std::unique_ptr<StripeExchange> exchange = absl::WrapUnique(
      new StripeExchange(grid, rank, max_rows, query_dim, value_dim, backend.kernels()));
  ASSIGN_OR_RETURN(exchange->group_, world.SplitAlong(grid, GridAxis::kStripe));
  const auto floats = [&backend](int64_t count) {
    return backend.Allocate(static_cast<size_t>(count * kFloatBytes));
  };
  ASSIGN_OR_RETURN(exchange->queries_, floats(max_rows * query_dim));
  ASSIGN_OR_RETURN(exchange->partials_, floats(max_rows * (value_dim + 1)));
  ASSIGN_OR_RETURN(exchange->received_, floats(max_rows * (value_dim + 1)));
  return exchange;
}

int64_t StripeExchange::HeadsOfRound(int64_t tokens) const {
  const auto stripes = static_cast<int64_t>(heads_.size());
  return std::clamp<int64_t>(max_rows_ / std::max<int64_t>(1, tokens * stripes), 1,
                             std::max<int64_t>(1, max_heads_));
}

absl::StatusOr<ConstHeadsView> StripeExchange::GatherQueries(ConstHeadsView own, int64_t first,
                                                             int64_t count, Stream& stream) {
  tokens_ = own.tokens;
  round_heads_.clear();
  int64_t own_begin = 0;
  for (size_t peer = 0; peer < heads_.size(); ++peer) {
    if (static_cast<int>(peer) == group_->rank()) own_begin = Sum(round_heads_);
    round_heads_.push_back(std::clamp<int64_t>(heads_[peer] - first, 0, count));
  }
  CHECK_EQ(own.heads, round_heads_[group_->rank()]);
  CHECK_LE(Sum(round_heads_) * tokens_, max_rows_);
  const int64_t head_floats = tokens_ * query_dim_;
  float* place = queries_.as<float>() + own_begin * head_floats;
  RETURN_IF_ERROR(kernels_.copy_heads(
      {.x = own, .out = HeadMajor(place, tokens_, own.heads, query_dim_)}, stream));
  std::vector<int64_t> bytes;
  for (const int64_t heads : round_heads_) bytes.push_back(heads * head_floats * kFloatBytes);
  RETURN_IF_ERROR(group_->AllGatherV(place, queries_.data(), bytes, stream));
  return ConstHeadsView(HeadMajor(queries_.as<float>(), tokens_, Sum(round_heads_), query_dim_));
}

HeadsView StripeExchange::Part(int64_t offset, int64_t dim) const {
  HeadsView view = HeadMajor(partials_.as<float>(), tokens_, Sum(round_heads_), value_dim_ + 1);
  view.data += offset;
  view.dim = dim;
  return view;
}

absl::Status StripeExchange::Merge(HeadsView out, Stream& stream) {
  const int64_t row_floats = value_dim_ + 1;
  const int64_t own_heads = round_heads_[group_->rank()];
  const int64_t own_floats = own_heads * tokens_ * row_floats;
  std::vector<int64_t> sent, received;
  for (const int64_t heads : round_heads_) {
    sent.push_back(heads * tokens_ * row_floats * kFloatBytes);
    received.push_back(own_floats * kFloatBytes);
  }
  RETURN_IF_ERROR(group_->AllToAllV(partials_.data(), sent, received_.data(), received, stream));
  HeadsView part = HeadMajor(received_.as<float>(), tokens_, own_heads, row_floats);
  HeadsView log_sum_exp = part;
  part.dim = value_dim_;
  log_sum_exp.data += value_dim_;
  log_sum_exp.dim = 1;
  return kernels_.merge_partials({.partials = part,
                                  .partial_stride = own_floats,
                                  .log_sum_exps = log_sum_exp,
                                  .log_sum_exp_stride = own_floats,
                                  .num_parts = static_cast<int64_t>(round_heads_.size()),
                                  .out = out,
                                  .log_sum_exp = {}},
                                 stream);
}

}  // namespace heddle
