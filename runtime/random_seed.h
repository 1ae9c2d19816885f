// Seeds that are derived from seeds.
#pragma once

#include <cstdint>

namespace heddle {

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of the input moves every bit
// of the output.
inline uint64_t MixBits(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// A seed of its own for the `index`-th user of `seed`.
inline uint64_t MixSeeds(uint64_t seed, uint64_t index) { return MixBits(MixBits(seed) + index); }

}  // namespace heddle
