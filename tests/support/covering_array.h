// Few combinations of parameters that hold every pair of values.
#pragma once

#include <cstddef>
#include <vector>

namespace heddle {

// Rows of value indexes, one a parameter; for any two parameters every pair of their values is in
// some row. Greedy and deterministic. sizes: values of each parameter, all >= 1.
std::vector<std::vector<size_t>> PairwiseCoveringArray(const std::vector<size_t>& sizes);

// Every combination.
std::vector<std::vector<size_t>> FullProduct(const std::vector<size_t>& sizes);

}  // namespace heddle
