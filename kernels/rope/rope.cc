#include "kernels/rope/rope.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateRope(const RopeArgs& args) {
  RETURN_IF_ERROR(ValidateFloatMatrix("rope", "x", args.x));
  if (args.num_heads < 0 || args.head_dim < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: ", args.num_heads, " heads of ", args.head_dim, " elements"));
  }
  RETURN_IF_ERROR(ValidateShape("rope", "x", args.x, args.x.rows, args.num_heads * args.head_dim));
  if (args.rotary_dim < 0 || args.rotary_dim % 2 != 0 || args.rotary_dim > args.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rope: rotary_dim ", args.rotary_dim, " is not even and within head_dim ", args.head_dim));
  }
  RETURN_IF_ERROR(
      ValidateArray("rope", "cos_sin", args.cos_sin, args.num_positions * args.rotary_dim));
  return ValidateArray("rope", "positions", args.positions, args.x.rows);
}

}  // namespace heddle
