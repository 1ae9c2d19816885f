#include "kernels/norm/rms_norm.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/validate.h"

namespace heddle {

absl::Status ValidateRmsNorm(const RmsNormArgs& args) {
  RETURN_IF_ERROR(ValidateFloatMatrix("rms_norm", "x", args.x));
  RETURN_IF_ERROR(ValidateFloatMatrix("rms_norm", "out", args.out));
  RETURN_IF_ERROR(ValidateShape("rms_norm", "out", args.out, args.x.rows, args.x.cols));
  if (!(args.epsilon >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rms_norm: epsilon is ", args.epsilon, ", not >= 0"));
  }
  return ValidateArray("rms_norm", "weight", args.weight, args.x.cols);
}

}  // namespace heddle
