// Groups the tokens of a step by expert.
#pragma once

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace heddle {

// A token's choice of an expert held here, one of [first_expert, first_expert + num_experts), is an
// entry. Entries are ordered by expert, then by token. Choices of other experts, which are other
// ranks', have none. The arrays have room for tokens * top_k entries; what lies past
// expert_starts[num_experts] is left alone.
struct ExpertDispatchArgs {
  const int32_t* expert_ids = nullptr;  // [tokens, top_k]
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  int64_t first_expert = 0;
  int64_t num_experts = 0;
  int32_t* expert_starts = nullptr;  // [num_experts + 1] first entry of each expert; then how many
  int32_t* entry_tokens = nullptr;   // [tokens * top_k] token of each entry
  int32_t* entry_of = nullptr;       // [tokens, top_k] entry of each choice, or -1
};

absl::Status ValidateExpertDispatch(const ExpertDispatchArgs& args);
using ExpertDispatchFn = absl::Status (*)(const ExpertDispatchArgs& args, Stream& stream);

}  // namespace heddle
