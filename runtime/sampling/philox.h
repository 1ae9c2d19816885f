// Random numbers as a pure function of (seed, position, token id).
#pragma once

#include <array>
#include <cstdint>

namespace heddle {

// Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011): ten rounds turn a 128-bit counter and a 64-bit key into 128 random bits. There is no
// state, so neither batch mates nor the number of ranks can shift a stream.
//
// Several counters at once, words[word][lane], so that the rounds become vector instructions.
template <int kLanes>
void PhiloxRounds(uint64_t key, uint32_t (&words)[4][kLanes]) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t product0 = uint64_t{0xD2511F53} * words[0][lane];
      const uint64_t product1 = uint64_t{0xCD9E8D57} * words[2][lane];
      words[0][lane] = static_cast<uint32_t>(product1 >> 32) ^ words[1][lane] ^ key0;
      words[1][lane] = static_cast<uint32_t>(product1);
      words[2][lane] = static_cast<uint32_t>(product0 >> 32) ^ words[3][lane] ^ key1;
      words[3][lane] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

inline std::array<uint32_t, 4> Philox4x32(const std::array<uint32_t, 4>& counter, uint64_t key) {
  uint32_t words[4][1] = {{counter[0]}, {counter[1]}, {counter[2]}, {counter[3]}};
  PhiloxRounds(key, words);
  return {words[0][0], words[1][0], words[2][0], words[3][0]};
}

}  // namespace heddle
