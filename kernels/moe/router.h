// Which experts each token goes to, and how much each of them counts.
#pragma once

namespace heddle {

// How logits become scores, in float32.
enum class RouterScore { kSoftmax, kSigmoid };

// What a group of experts is chosen by: its best biased score, or the sum of its two best.
enum class GroupScore { kMax, kTopTwoSum };

}  // namespace heddle
