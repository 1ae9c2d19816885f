#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/parallel_rows.h"
#include "kernels/moe/moe_cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/router_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heddle {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// scores[i] = e^(logits[i] - maximum), which is at most 1.
template <class D>
HWY_INLINE void ExpAt(D d, const float* logits, float maximum, float* scores, int64_t i) {
  hn::StoreU(ExpUpTo88(d, hn::Sub(hn::LoadU(d, logits + i), hn::Set(d, maximum))), d, scores + i);
}

template <class D>
HWY_INLINE void SigmoidAt(D d, const float* logits, float* scores, int64_t i) {
  const auto one = hn::Set(d, 1.0f);
  const auto x = hn::LoadU(d, logits + i);
  hn::StoreU(hn::Div(one, hn::Add(one, Exp(d, hn::Neg(x)))), d, scores + i);
}

void SigmoidRow(const float* logits, float* scores, int64_t experts) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= experts; i += lanes) SigmoidAt(d, logits, scores, i);
  for (; i < experts; ++i) SigmoidAt(hn::CappedTag<float, 1>(), logits, scores, i);
}

// Sums in ascending order, in one chain, so that the vector length does not matter.
void SoftmaxRow(const float* logits, float* scores, int64_t experts) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  const float maximum = *std::max_element(logits, logits + experts);
  int64_t i = 0;
  for (; i + lanes <= experts; i += lanes) ExpAt(d, logits, maximum, scores, i);
  for (; i < experts; ++i) ExpAt(hn::CappedTag<float, 1>(), logits, maximum, scores, i);
  float sum = 0.0f;
  for (i = 0; i < experts; ++i) sum += scores[i];
  for (i = 0; i < experts; ++i) scores[i] /= sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace heddle
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heddle {
namespace {

HWY_EXPORT(SigmoidRow);
HWY_EXPORT(SoftmaxRow);

// The best few of the ids that are offered in ascending order.
class Best {
 public:
  explicit Best(int64_t size) : entries_(size) {}

  void Clear() { count_ = 0; }

  // A later id must be better, not as good, to go before an earlier one.
  void Offer(float key, int32_t id) {
    if (std::isnan(key)) key = std::numeric_limits<float>::infinity();
    const auto size = static_cast<int64_t>(entries_.size());
    if (count_ == size && !(key > entries_.back().key)) return;
    if (count_ < size) ++count_;
    int64_t at = count_ - 1;
    for (; at > 0 && key > entries_[at - 1].key; --at) entries_[at] = entries_[at - 1];
    entries_[at] = {key, id};
  }

  float key(int64_t i) const { return entries_[i].key; }
  int32_t id(int64_t i) const { return entries_[i].id; }

 private:
  struct Entry {
    float key;
    int32_t id;
  };
  std::vector<Entry> entries_;  // [count_] best first
  int64_t count_ = 0;
};

// Routes the rows of one thread.
class RowRouter {
 public:
  explicit RowRouter(const RouterArgs& args)
      : args_(args),
        group_size_(args.logits.cols / args.num_groups),
        scores_(args.logits.cols),
        biased_(args.logits.cols),
        best_of_group_(args.group_score == GroupScore::kMax ? 1 : 2),
        best_groups_(args.num_top_groups),
        groups_(args.num_top_groups),
        best_experts_(args.top_k) {}

  void Route(int64_t row) {
    const int64_t experts = args_.logits.cols;
    if (args_.score == RouterScore::kSoftmax) {
      HWY_DYNAMIC_DISPATCH(SoftmaxRow)(args_.logits.Row<float>(row), scores_.data(), experts);
    } else {
      HWY_DYNAMIC_DISPATCH(SigmoidRow)(args_.logits.Row<float>(row), scores_.data(), experts);
    }
    biased_ = scores_;
    if (args_.correction_bias != nullptr) {
      for (int64_t e = 0; e < experts; ++e) biased_[e] += args_.correction_bias[e];
    }
    ChooseGroups();
    best_experts_.Clear();
    for (const int32_t group : groups_) OfferGroup(group, best_experts_);
    StoreChoice(row);
  }

 private:
  void OfferGroup(int64_t group, Best& best) const {
    for (int64_t e = group * group_size_; e < (group + 1) * group_size_; ++e) {
      best.Offer(biased_[e], static_cast<int32_t>(e));
    }
  }

  // Sets groups_, in ascending order.
  void ChooseGroups() {
    if (args_.num_top_groups == args_.num_groups) {
      for (size_t i = 0; i < groups_.size(); ++i) groups_[i] = static_cast<int32_t>(i);
      return;
    }
    best_groups_.Clear();
    for (int64_t group = 0; group < args_.num_groups; ++group) {
      best_of_group_.Clear();
      OfferGroup(group, best_of_group_);
      const float key = args_.group_score == GroupScore::kMax
                            ? best_of_group_.key(0)
                            : best_of_group_.key(0) + best_of_group_.key(1);
      best_groups_.Offer(key, static_cast<int32_t>(group));
    }
    for (size_t i = 0; i < groups_.size(); ++i) groups_[i] = best_groups_.id(i);
    std::sort(groups_.begin(), groups_.end());
  }

  void StoreChoice(int64_t row) const {
    int32_t* ids = args_.expert_ids + row * args_.top_k;
    float* weights = args_.expert_weights + row * args_.top_k;
    float sum = 0.0f;
    for (int64_t j = 0; j < args_.top_k; ++j) {
      ids[j] = best_experts_.id(j);
      weights[j] = scores_[ids[j]];
      sum += weights[j];
    }
    const float divisor = args_.normalise_weights ? sum + 1e-20f : 1.0f;
    for (int64_t j = 0; j < args_.top_k; ++j) {
      weights[j] = weights[j] / divisor * args_.scaling_factor;
    }
  }

  const RouterArgs& args_;
  const int64_t group_size_;
  std::vector<float> scores_;  // [experts]
  std::vector<float> biased_;  // [experts]
  Best best_of_group_;
  Best best_groups_;
  std::vector<int32_t> groups_;  // [num_top_groups]
  Best best_experts_;
};

}  // namespace

absl::Status RouterCpu(const RouterArgs& args, Stream& stream) {
  RETURN_IF_ERROR(ValidateRouter(args));
  CpuStream::From(stream).Enqueue([args](CpuThreadPool& pool) {
    // An expert's score costs about as much as eight elements of an element-wise op.
    ParallelRows(pool, args.logits.rows, 8 * args.logits.cols, [&](int64_t begin, int64_t end) {
      RowRouter router(args);
      for (int64_t row = begin; row < end; ++row) router.Route(row);
    });
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace heddle
#endif  // HWY_ONCE
