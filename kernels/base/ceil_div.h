// Division that rounds up.
#pragma once

#include <cstdint>

namespace heddle {

// a / b, rounded up. `a` at least 0, `b` above 0, their sum no more than an int64_t holds.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace heddle
