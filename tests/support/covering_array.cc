#include "tests/support/covering_array.h"

#include <algorithm>
#include <set>
#include <tuple>

namespace heddle {
namespace {

// (parameter, value, parameter, value), the first parameter before the second.
using Pair = std::tuple<size_t, size_t, size_t, size_t>;

Pair MakePair(size_t a, size_t value_a, size_t b, size_t value_b) {
  return a < b ? Pair{a, value_a, b, value_b} : Pair{b, value_b, a, value_a};
}

}  // namespace

std::vector<std::vector<size_t>> PairwiseCoveringArray(const std::vector<size_t>& sizes) {
  std::set<Pair> uncovered;
  for (size_t a = 0; a < sizes.size(); ++a) {
    for (size_t b = a + 1; b < sizes.size(); ++b) {
      for (size_t i = 0; i < sizes[a]; ++i) {
        for (size_t j = 0; j < sizes[b]; ++j) uncovered.insert({a, i, b, j});
      }
    }
  }
  std::vector<std::vector<size_t>> rows;
  while (!uncovered.empty()) {
    // Each row covers the first pair that is left, and as many more as a greedy choice finds.
    const auto [a, value_a, b, value_b] = *uncovered.begin();
    std::vector<bool> chosen(sizes.size(), false);
    std::vector<size_t> row(sizes.size(), 0);
    row[a] = value_a;
    row[b] = value_b;
    chosen[a] = chosen[b] = true;
    for (size_t parameter = 0; parameter < sizes.size(); ++parameter) {
      if (chosen[parameter]) continue;
      std::vector<size_t> gains(sizes[parameter], 0);
      for (size_t value = 0; value < sizes[parameter]; ++value) {
        for (size_t other = 0; other < sizes.size(); ++other) {
          gains[value] +=
              chosen[other] && uncovered.count(MakePair(parameter, value, other, row[other])) > 0;
        }
      }
      row[parameter] =
          static_cast<size_t>(std::max_element(gains.begin(), gains.end()) - gains.begin());
      chosen[parameter] = true;
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (size_t j = i + 1; j < sizes.size(); ++j) uncovered.erase({i, row[i], j, row[j]});
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<std::vector<size_t>> FullProduct(const std::vector<size_t>& sizes) {
  std::vector<std::vector<size_t>> rows(1);
  for (const size_t size : sizes) {
    std::vector<std::vector<size_t>> longer;
    for (const std::vector<size_t>& row : rows) {
      for (size_t value = 0; value < size; ++value) {
        longer.push_back(row);
        longer.back().push_back(value);
      }
    }
    rows = std::move(longer);
  }
  return rows;
}

}  // namespace heddle
