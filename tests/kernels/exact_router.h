// Routing in double precision, the naive way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/moe/router.h"

namespace heddle {

// RouterArgs without its arrays.
struct RouterRules {
  int64_t experts = 0;
  int64_t top_k = 1;
  RouterScore score = RouterScore::kSoftmax;
  int64_t num_groups = 1;
  int64_t num_top_groups = 1;
  GroupScore group_score = GroupScore::kMax;
  bool normalise = false;
  double factor = 1.0;
};

// Indexes of the `count` greatest values, best first, and the least step down from one of them to
// the next.
struct ExactTop {
  std::vector<int64_t> ids;
  double margin = std::numeric_limits<double>::infinity();
};

inline ExactTop TopOf(const std::vector<double>& values, int64_t count) {
  std::vector<int64_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  ExactTop top;
  top.ids.assign(order.begin(), order.begin() + count);
  for (int64_t i = 0; i < count && i + 1 < static_cast<int64_t>(order.size()); ++i) {
    top.margin = std::min(top.margin, values[order[i]] - values[order[i + 1]]);
  }
  return top;
}

struct ExactRouting {
  std::vector<int64_t> ids;
  std::vector<double> weights;
  double margin = 0;  // of all choices; below the error of the scores, ids are a matter of luck
};

// Of one token. The bias is [experts] or empty.
template <typename Float>
ExactRouting RouteExactly(const RouterRules& rules, const Float* logits,
                          const std::vector<float>& bias) {
  std::vector<double> scores(rules.experts), biased(rules.experts);
  double sum = 0;
  for (int64_t e = 0; e < rules.experts; ++e) {
    const double x = logits[e];
    scores[e] = rules.score == RouterScore::kSoftmax ? std::exp(x) : 1 / (1 + std::exp(-x));
    sum += scores[e];
  }
  if (rules.score == RouterScore::kSoftmax) {
    for (double& score : scores) score /= sum;
  }
  for (int64_t e = 0; e < rules.experts; ++e) biased[e] = scores[e] + (bias.empty() ? 0 : bias[e]);

  const int64_t size = rules.experts / rules.num_groups;
  std::vector<double> group_scores(rules.num_groups);
  for (int64_t group = 0; group < rules.num_groups; ++group) {
    const std::vector<double> members(biased.begin() + group * size,
                                      biased.begin() + (group + 1) * size);
    const int64_t count = rules.group_score == GroupScore::kMax || size == 1 ? 1 : 2;
    for (const int64_t e : TopOf(members, count).ids) group_scores[group] += members[e];
  }
  const ExactTop groups = TopOf(group_scores, rules.num_top_groups);
  std::vector<double> masked(rules.experts, -std::numeric_limits<double>::infinity());
  for (const int64_t group : groups.ids) {
    std::copy_n(biased.begin() + group * size, size, masked.begin() + group * size);
  }
  const ExactTop experts = TopOf(masked, rules.top_k);

  ExactRouting routing;
  routing.ids = experts.ids;
  routing.margin = experts.margin;
  if (rules.num_top_groups < rules.num_groups) {
    routing.margin = std::min(routing.margin, groups.margin);
  }
  double chosen = 0;
  for (const int64_t e : routing.ids) chosen += scores[e];
  for (const int64_t e : routing.ids) {
    routing.weights.push_back(scores[e] / (rules.normalise ? chosen + 1e-20 : 1.0) * rules.factor);
  }
  return routing;
}

}  // namespace heddle
